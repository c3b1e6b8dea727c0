"""The model's choice of a token: logits adjusted by the text, then greedy or sampled.

Penalties and bans adjust the logits. They are functions of a position, its text and its
logits, as the logits processors of transformers. The drafts of a tree are texts too:
every node is judged by the text of its own path.

The random numbers of a position depend only on the key of the row and on the position,
not on the drafts. All drafting methods therefore sample the same text, token for token,
with the distribution of plain sampling: a draft token is accepted only if it is the
token that the model samples at its position.

They are known before the model runs. `CommonNoise` adds them to the predictions of
heads and block drafters, so that these draft the token that will be sampled instead of
the one that is most probable.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.decoding.options import StepOptions
from bpd_jax.drafting.draft_tree import DraftTree, take

# Random streams: drafts and acceptance use other random numbers than the choice of
# tokens.
DRAFTS, ACCEPTANCE = 1, 2


def row_keys(seed: int | np.integer | Array, rows: Int[Array, " B"]) -> Array:
    """One key per prompt, which does not depend on the batch of the prompt."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows)


def stream_keys(keys: Array, positions: Int[Array, " B"], stream: int) -> Array:
    """One key per row, for a random stream at a position of the text."""

    def key_at(key: Array, position: Array) -> Array:
        # `choose` folds in positions, which never reach these numbers.
        stream_key = jax.random.fold_in(key, jnp.uint32(2**32 - stream))
        return jax.random.fold_in(stream_key, position)

    return jax.vmap(key_at)(keys, positions)


def filtered(
    logits: Float[Array, "... V"], options: StepOptions
) -> Float[Array, "... V"]:
    """Logits divided by the temperature; -inf for tokens that filters remove.

    Top-p is applied to the result of top-k, as in Hugging Face's `generate`. Top-k
    keeps exactly k tokens, with ties broken by the lowest id; top-p keeps all tokens
    that tie with the last one. Min-p comes last.

    Args:
      options: options with a temperature above 0.
    """
    logits = logits / options.temperature
    vocab_size = logits.shape[-1]
    if options.top_k is not None and options.top_k < vocab_size:
        best, tokens = jax.lax.top_k(logits, options.top_k)
        none = jnp.full_like(logits, -jnp.inf)
        logits = jnp.put_along_axis(none, tokens, best, axis=-1, inplace=False)
    if options.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probs = jax.nn.softmax(ordered, axis=-1)
        # A token is kept if the sum of the probabilities before it is below top_p.
        before = jnp.cumsum(probs, axis=-1) - probs
        count = (before < options.top_p).sum(-1, keepdims=True)
        lowest = jnp.take_along_axis(ordered, count - 1, axis=-1)
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
    if options.min_p > 0:
        highest = logits.max(-1, keepdims=True)
        too_low = logits < highest + jnp.log(options.min_p)
        logits = jnp.where(too_low, -jnp.inf, logits)
    return logits


def choose(
    logits: Float[Array, "B M V"],
    positions: Int[Array, "B M"],
    keys: Array,
    options: StepOptions,
) -> Int[Array, "B M"]:
    """The model's choice of the token at each of `positions`.

    Args:
      positions: index of the chosen token in the text.
      keys: one random key per row.
      options: options with a temperature above 0: tokens are sampled from the softmax
        of `filtered` logits with the Gumbel-max trick.
        With top-k, the random number of a token depends on the key of the row, the
        position and the token, but not on its rank, so that rounding differences that
        swap two tokens do not swap their random numbers.
    """
    top_k = options.top_k
    if top_k is None or top_k >= logits.shape[-1]:

        def draw(key: Array, position: Array, row: Array) -> Array:
            return jnp.argmax(row + _noise(key, position, row.shape[0]))

        over_nodes = jax.vmap(draw, (None, 0, 0))
        drawn = jax.vmap(over_nodes)(keys, positions, filtered(logits, options))
        return drawn.astype(jnp.int32)

    def draw_among(key: Array, position: Array, row: Array, tokens: Array) -> Array:
        return tokens[jnp.argmax(row + _noise_of(key, position, tokens))]

    # Random numbers for k tokens only: for V they would take longer than a pass.
    best, tokens = jax.lax.top_k(logits, top_k)
    scaled = filtered(best, dataclasses.replace(options, top_k=None))
    among_nodes = jax.vmap(draw_among, (None, 0, 0, 0))
    drawn = jax.vmap(among_nodes)(keys, positions, scaled, tokens)
    return drawn.astype(jnp.int32)


def _noise(key: Array, position: Int[Array, ""], vocab_size: int) -> Float[Array, " V"]:
    """Gumbel noise of all tokens at a position of a row."""
    return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,))


def _noise_of(
    key: Array, position: Int[Array, ""], tokens: Int[Array, " k"]
) -> Float[Array, " k"]:
    """The same of some tokens, with top-k."""
    key_at = jax.random.fold_in(key, position)
    token_keys = jax.vmap(jax.random.fold_in, (None, 0))(key_at, tokens)
    return jax.vmap(jax.random.gumbel)(token_keys)


@dataclasses.dataclass(frozen=True)
class CommonNoise:
    """The random numbers with which the model will sample, for drafts.

    The model chooses argmax (logits / t + g) with a temperature t and the Gumbel noise
    g of the position. A head that predicts log-probabilities log q of this position
    ranks tokens by log q + w · t · g, with the weight w of `StepOptions.draft_noise`.
    With w = 1 and q = p it drafts the model's choice. Daliri, Musco and Suresh (2025)
    couple a draft model so; here all positions are predicted at once, and the sums are
    the scores of a lattice. Which token is accepted does not depend on them.

    Attributes:
      keys: one random key per row; see `row_keys`.
      lengths: index of the certain token in each text.
      vocab_size: V of the model.
      options: options whose `couples_drafts` is true.
    """

    keys: Array
    lengths: Int[Array, " B"]
    vocab_size: int
    options: StepOptions

    def __call__(
        self,
        log_probs: Float[Array, "B P draft"],
        width: int,
        tokens: Int[Array, " draft"] | None = None,
    ) -> Float[Array, "B P draft"]:
        """Adds the noise of the P positions after the certain token.

        Args:
          width: number of candidates that will be chosen.
          tokens: ids of the draft vocabulary; None if it is that of the model.
        """
        positions = self.lengths[:, None] + 1 + jnp.arange(log_probs.shape[1])
        weight = self.options.draft_noise * self.options.temperature
        top_k = self.options.top_k
        if top_k is None or top_k >= self.vocab_size:

            def add(key: Array, position: Array, row: Array) -> Array:
                noise = _noise(key, position, self.vocab_size)
                return row + weight * (noise if tokens is None else noise[tokens])
        else:
            # The model will choose among its `top_k` best tokens, the head among its.
            count = min(max(top_k, width), log_probs.shape[-1])

            def add(key: Array, position: Array, row: Array) -> Array:
                best, places = jax.lax.top_k(row, count)
                ids = places if tokens is None else tokens[places]
                sums = best + weight * _noise_of(key, position, ids)
                return jnp.full_like(row, -jnp.inf).at[places].set(sums)

        return jax.vmap(jax.vmap(add, (None, 0, 0)))(self.keys, positions, log_probs)


def common_noise(
    model: Any, keys: Array, lengths: Int[Array, " B"], options: StepOptions
) -> CommonNoise | None:
    """The noise for drafts; None if the options do not couple them."""
    if not options.couples_drafts:
        return None
    return CommonNoise(keys, lengths, model.config.trunk.vocab_size, options)


def texts_of_nodes(
    tokens: Int[Array, "B S"], lengths: Int[Array, " B"], tree: DraftTree, depth: int
) -> tuple[Int[Array, "B M S"], Int[Array, "B M"]]:
    """The text up to and including each node of a tree, and its length.

    Args:
      tokens: the texts before the drafts, with room for `depth` more tokens.
      tree: the drafts, merged by prefix.
      depth: number of nodes on the longest path.
    """
    batch, size = tree.tokens.shape
    texts = jnp.broadcast_to(tokens[:, None], (batch, size, tokens.shape[1]))
    rows, nodes = jnp.arange(batch)[:, None], jnp.arange(size)
    node = jnp.broadcast_to(nodes, (batch, size))
    for _ in range(depth):
        known = jnp.maximum(node, 0)
        place = lengths[:, None] + take(tree.depths, known)
        # Beyond the root, the write is dropped.
        place = jnp.where(node < 0, tokens.shape[1], place)
        texts = texts.at[rows, nodes, place].set(take(tree.tokens, known), mode="drop")
        node = jnp.where(node < 0, -1, take(tree.parents, known))
    return texts, lengths[:, None] + tree.depths + 1


def adjusted(
    logits: Float[Array, "B M V"],
    texts: Int[Array, "B M S"],
    lengths: Int[Array, "B M"],
    starts: Int[Array, " B"],
    options: StepOptions,
) -> Float[Array, "B M V"]:
    """The logits of the next token after each text, adjusted.

    Args:
      texts: prompt and text so far; the values after them are arbitrary.
      options: options of which some `adjusts` the logits.
    """
    adjust = jax.vmap(_adjusted, (0, 0, 0, None, None))
    return jax.vmap(adjust, (0, 0, 0, 0, None))(logits, texts, lengths, starts, options)


def _adjusted(
    logits: Float[Array, " V"],
    text: Int[Array, " S"],
    length: Int[Array, ""],
    start: Int[Array, ""],
    options: StepOptions,
) -> Float[Array, " V"]:
    vocab_size, slots = logits.shape[0], text.shape[0]
    index = jnp.arange(slots)
    nowhere = jnp.full_like(text, vocab_size)
    if options.penalty != 1:
        seen = jnp.where(index < length, text, nowhere)
        seen = jnp.zeros(vocab_size, bool).at[seen].set(True, mode="drop")
        penalty = options.penalty
        lower = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(seen, lower, logits)

    def ban(logits: Array, tokens: Array, when: Array | bool = True) -> Array:
        tokens = jnp.where(when, tokens, vocab_size)
        return logits.at[tokens].set(-jnp.inf, mode="drop")

    if (size := options.no_repeat_ngram_size or 0) > 0:
        # The n-grams of the text whose first n - 1 tokens are its last n - 1 tokens.
        repeats = index + size <= length
        for offset in range(size - 1):
            at = jnp.clip(length - (size - 1) + offset, 0, slots - 1)
            repeats &= jnp.roll(text, -offset) == text[at]
        logits = ban(logits, jnp.roll(text, -(size - 1)), repeats)
    for word in options.bad_words_ids or ():
        *before, last = word
        if not before and last in options.end_tokens:
            continue  # As in transformers: the end of the text is no bad word.
        matches = length >= len(word) - (len(word) == 1)
        for offset, token in enumerate(before):
            at = jnp.clip(length - len(before) + offset, 0, slots - 1)
            matches &= text[at] == token
        logits = ban(logits, jnp.array([last]), matches)
    ends = jnp.array(options.end_tokens or [vocab_size])
    if options.min_length:
        logits = ban(logits, ends, length < options.min_length)
    if options.min_new_tokens:
        logits = ban(logits, ends, length - start < options.min_new_tokens)
    if options.suppress_tokens:
        logits = ban(logits, jnp.array(options.suppress_tokens))
    if options.begin_suppress_tokens:
        at_begin = length == start
        logits = ban(logits, jnp.array(options.begin_suppress_tokens), at_begin)
    return logits
