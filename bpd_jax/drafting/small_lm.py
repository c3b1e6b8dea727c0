"""A small LM with its own cache, which reads the text and the paths of a search.

Its cache is part of the memory of the drafter. Before each serial call, one pass reads
the tokens accepted in the last call and the certain token. The last tokens of paths are
then read position by position; each of them attends to the text and to its own path.

Worked example (reach 3, one row; the text was `a b`, then `c d` were accepted and `e`
is certain; `c` was the certain token of the previous call):

    cache     a b c          `c` was certain, so it was cached in the previous call
    window    d e .          2 tokens are new, the rest is padding
    cache     a b c d e      the hidden state of `e` predicts the next token
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.drafting.draft_tree import take
from bpd_jax.drafting.interface import Extension, View
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.cache import KeyValues, KVCache, commit
from bpd_jax.models.model import Model

# Number of tokens of the prompts that are read in one pass.
_CHUNK = 128
# The logit of a token that the small LM does not have; finite, so that 0 times it is 0.
_NEVER = -1e9


@flax.struct.dataclass
class Reading:
    """The state of a sequential drafter, such as a small LM, at the ends of n paths.

    Attributes:
      cache: keys and values of the text, including the certain token.
      drafted: keys and values of the U draft tokens read so far.
      seen: whether each of them is part of each path.
      hidden: hidden state at the last token of each path.
    """

    cache: KVCache
    drafted: KeyValues
    seen: Bool[Array, "B n U"]
    hidden: Float[Array, "B n D"]


def attended(reading: Reading, extension: Extension) -> Bool[Array, "B m U+m"]:
    """`Reading.seen` of new paths: their parents' tokens, then the last of each."""
    batch, count = extension.tokens.shape
    itself = jnp.broadcast_to(jnp.eye(count, dtype=bool), (batch, count, count))
    path = take(reading.seen, extension.parents)
    return jnp.concatenate([path, itself], axis=2)


def extended(drafted: KeyValues, new: KeyValues) -> KeyValues:
    """Keys and values of the draft tokens, with those of further ones."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), drafted, new)


@dataclasses.dataclass(frozen=True)
class SmallLM:
    """Functions of a small language model that assists drafting.

    Attributes:
      sizes: the small LM without its parameters, which are arguments of the methods.
      reach: highest number of tokens that one serial call accepts.
      vocab_size: V of the large model; None for that of the small LM. Rows that only
        one of them has are no tokens.
    """

    sizes: Model
    reach: int
    vocab_size: int | None = None

    def prefill(
        self, params: Params, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> KVCache:
        """Reads the prompts in chunks, because `tokens` is padded to the whole text."""
        batch, slots = tokens.shape
        chunk = min(_CHUNK, slots)
        # `commit` writes complete chunks, also in rows that are finished.
        extra_slots = max(chunk, self.reach)

        def read(cache: KVCache) -> KVCache:
            positions = cache.lengths[:, None] + jnp.arange(chunk)
            window = jnp.take_along_axis(tokens, positions, axis=1, mode="clip")
            _, new = self._pass(params, window, cache)
            return commit(cache, new, jnp.clip(lengths - cache.lengths, 0, chunk))

        model = self.sizes.with_params(params)
        empty = model.empty_cache(batch, slots + extra_slots)
        return jax.lax.while_loop(
            lambda cache: (cache.lengths < lengths).any(), read, empty
        )

    def read_on(
        self,
        params: Params,
        cache: KVCache,
        view: View,
        following: Int[Array, "B E"],
    ) -> tuple[Float[Array, "B E D"], KVCache, KeyValues]:
        """Reads the newly accepted tokens and a draft in one pass.

        Args:
          cache: the text without the newly accepted tokens.
          following: the certain token and a draft.

        Returns:
          Final hidden states of `following`; the cache with the text and the certain
          token; and keys and values of the pass. In finished rows, only the text in the
          cache is meaningful.
        """
        missing = view.lengths - cache.lengths
        columns = jnp.arange(self.reach - 1 + following.shape[1])
        positions = cache.lengths[:, None] + columns
        ahead = columns - missing[:, None]
        window = jnp.where(
            ahead < 0,
            jnp.take_along_axis(view.tokens, positions, axis=1, mode="clip"),
            jnp.take_along_axis(following, ahead, axis=1, mode="clip"),
        )
        hidden, new = self._pass(params, window, cache)
        # In a finished row the certain token has been read, but is not in the text.
        counts = jnp.clip(missing + 1, 0, self.reach)
        text = jax.tree.map(lambda array: array[:, :, : self.reach], new)
        at = missing[:, None] + jnp.arange(following.shape[1])
        return take(hidden, at), commit(cache, text, counts), new

    def start(self, params: Params, cache: KVCache, view: View) -> Reading:
        """Reads up to the certain token, the initial path."""
        hidden, cache, new = self.read_on(params, cache, view, view.next_token[:, None])
        no_drafts = jax.tree.map(lambda array: array[:, :, :0], new)
        seen = jnp.zeros((*hidden.shape[:2], 0), bool)
        return Reading(cache, no_drafts, seen, hidden)

    def extend(
        self, params: Params, reading: Reading, level: int, extension: Extension
    ) -> Reading:
        """Reads the last tokens of new paths, at position `level` of the block."""
        tokens, cache = extension.tokens, reading.cache
        seen = attended(reading, extension)
        # The last token of the cache is the certain token, at position 0 of the block.
        position = cache.lengths[:, None] + level - 1
        hidden, new, _ = self.sizes.with_params(params).forward(
            self._known(tokens),
            jnp.broadcast_to(position, tokens.shape),
            seen,
            cache,
            reading.drafted,
        )
        return Reading(cache, extended(reading.drafted, new), seen, hidden)

    def logits(
        self, params: Params, hidden: Float[Array, "... D"]
    ) -> Float[Array, "... V"]:
        """Logits of the next token, over the tokens of the large model."""
        logits = self.sizes.with_params(params).next_token_logits(hidden)
        if self.vocab_size is None or self.vocab_size == logits.shape[-1]:
            return logits
        logits = logits[..., : self.vocab_size]
        missing = [(0, 0)] * (logits.ndim - 1)
        missing.append((0, self.vocab_size - logits.shape[-1]))
        return jnp.pad(logits, missing, constant_values=_NEVER)

    def scores(
        self,
        params: Params,
        hidden: Float[Array, "B n D"],
        tokens: Int[Array, "B n W"],
    ) -> Float[Array, "B n W"]:
        """Log-probabilities of next tokens, over the whole vocabulary."""
        logits = self.logits(params, hidden)
        total = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
        return jnp.take_along_axis(logits, tokens, axis=-1) - total

    def _known(self, tokens: Array) -> Array:
        """The tokens, with the last row of the small LM for those without one."""
        if self.vocab_size is None:
            return tokens
        return jnp.minimum(tokens, self.sizes.config.trunk.vocab_size - 1)

    def _pass(
        self, params: Params, tokens: Int[Array, "B T"], cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """Runs a chain of tokens after those of the cache."""
        tokens = self._known(tokens)
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        mask = causal_mask(jnp.ones_like(tokens))
        model = self.sizes.with_params(params)
        return model.forward(tokens, positions, mask, cache)[:2]
