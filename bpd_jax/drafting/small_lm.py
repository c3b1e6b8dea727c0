"""A small LM that reads along: the text, and the drafts as a search grows them.

It has a cache of its own, the drafter's memory. Before each serial call it reads in one
pass what was accepted since the last one and the certain token; then, level by level,
the tokens by which paths grow, each of which sees the text and its own path.

Worked example (reach 3, one row; the text was `a b`, then `c d` were accepted and `e`
is certain; `c` was the certain token of the call before):

    cached    a b c          `c` was certain, so it was kept at once
    window    d e .          2 tokens are new, the rest is padding
    cached    a b c d e      what follows `e` is asked of its hidden state
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.drafting.interface import Extension, View
from bpd_jax.drafting.tree import take
from bpd_jax.models.cache import KeyValues, KVCache, commit
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.typing import Array, Bool, Float, Int, Params

# Tokens of the prompts that one pass reads.
_CHUNK = 128


@flax.struct.dataclass
class Reading:
    """What the small LM has read when it stands at the ends of n paths.

    Attributes:
      cache: the text, the certain token included.
      drafted: U draft tokens that it has read besides.
      seen: which of them each path consists of.
      hidden: final hidden state at the last token of each path.
    """

    cache: KVCache
    drafted: KeyValues
    seen: Bool[Array, "B n U"]
    hidden: Float[Array, "B n D"]


@dataclasses.dataclass(frozen=True)
class SmallLM:
    """A language model beside the one that is decoded.

    Attributes:
      functions: of the small LM; its parameters are handed to every method.
      reach: the most tokens that one serial call accepts.
    """

    functions: ModelFunctions
    reach: int

    def prefill(
        self, params: Params, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> KVCache:
        """Reads the prompts, piece by piece: `tokens` has far more columns than they.

        Args:
          params: of the small LM.
          tokens: prompts, with room for the whole text.
          lengths: of the prompts.
        """
        batch, slots = tokens.shape
        chunk = min(_CHUNK, slots)
        # Every pass writes all it reads, also in rows that are at their end.
        room = max(chunk, self.reach)

        def read(cache: KVCache) -> KVCache:
            places = cache.lengths[:, None] + jnp.arange(chunk)
            window = jnp.take_along_axis(tokens, places, axis=1, mode="clip")
            _, new = self._pass(params, window, cache)
            return commit(cache, new, jnp.clip(lengths - cache.lengths, 0, chunk))

        empty = self.functions.empty_cache(batch, slots + room)
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
        """Catches up with the text and reads on, in one pass.

        Args:
          params: of the small LM.
          cache: what it has read of the text: all but the last tokens.
          view: the text.
          following: the certain token and a draft that follows it.

        Returns:
          Final hidden states of `following`; the cache with the text and the certain
          token; and keys and values of the pass. Of rows that are finished the cache
          keeps the text, and the rest means nothing.
        """
        missing = view.lengths - cache.lengths
        columns = jnp.arange(self.reach - 1 + following.shape[1])
        places = cache.lengths[:, None] + columns
        ahead = columns - missing[:, None]
        window = jnp.where(
            ahead < 0,
            jnp.take_along_axis(view.tokens, places, axis=1, mode="clip"),
            jnp.take_along_axis(following, ahead, axis=1, mode="clip"),
        )
        hidden, new = self._pass(params, window, cache)
        # A finished row has read its certain token, which never becomes text.
        counts = jnp.clip(missing + 1, 0, self.reach)
        text = jax.tree.map(lambda array: array[:, :, : self.reach], new)
        at = missing[:, None] + jnp.arange(following.shape[1])
        return take(hidden, at), commit(cache, text, counts), new

    def start(self, params: Params, cache: KVCache, view: View) -> Reading:
        """Reads up to the certain token: the one path there is."""
        hidden, cache, new = self.read_on(params, cache, view, view.next_token[:, None])
        nothing = jax.tree.map(lambda array: array[:, :, :0], new)
        seen = jnp.zeros((*hidden.shape[:2], 0), bool)
        return Reading(cache, nothing, seen, hidden)

    def extend(
        self, params: Params, reading: Reading, level: int, extension: Extension
    ) -> Reading:
        """Reads the last tokens of new paths, at position `level` of the block."""
        tokens = extension.tokens
        cache, (batch, count) = reading.cache, tokens.shape
        itself = jnp.broadcast_to(jnp.eye(count, dtype=bool), (batch, count, count))
        path = take(reading.seen, extension.parents)
        seen = jnp.concatenate([path, itself], axis=2)
        # The certain token, at position 0 of the block, is the cache's last.
        place = cache.lengths[:, None] + level - 1
        hidden, new = self.functions.forward(
            params,
            tokens,
            jnp.broadcast_to(place, tokens.shape),
            seen,
            cache,
            reading.drafted,
        )
        drafted = jax.tree.map(
            lambda old, last: jnp.concatenate([old, last], axis=2),
            reading.drafted,
            new,
        )
        return Reading(cache, drafted, seen, hidden)

    def logits(
        self, params: Params, hidden: Float[Array, "... D"]
    ) -> Float[Array, "... V"]:
        """Of the next token."""
        return self.functions.next_token_logits(params, hidden)

    def scores(
        self,
        params: Params,
        hidden: Float[Array, "B n D"],
        tokens: Int[Array, "B n W"],
    ) -> Float[Array, "B n W"]:
        """log p of the next token, under the softmax over the whole vocabulary."""
        logits = self.logits(params, hidden)
        total = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
        return jnp.take_along_axis(logits, tokens, axis=-1) - total

    def _pass(
        self, params: Params, tokens: Int[Array, "B T"], cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """Reads a chain of tokens after the cache's."""
        batch, length = tokens.shape
        positions = cache.lengths[:, None] + jnp.arange(length)
        causal = jnp.tril(jnp.ones((length, length), bool))
        mask = jnp.broadcast_to(causal, (batch, length, length))
        return self.functions.forward(params, tokens, positions, mask, cache)
