"""The model's choice of a token: greedy, or sampled with position-based randomness.

The random numbers of a position depend only on the key of the row and on the position,
not on the drafts. All drafting methods therefore sample the same text, token for token,
with the distribution of plain sampling: a draft token is accepted only if it is the
token that the model samples at its position.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.decoding.options import StepOptions

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
            noise = jax.random.gumbel(jax.random.fold_in(key, position), row.shape)
            return jnp.argmax(row + noise)

        over_nodes = jax.vmap(draw, (None, 0, 0))
        drawn = jax.vmap(over_nodes)(keys, positions, filtered(logits, options))
        return drawn.astype(jnp.int32)

    def draw_among(key: Array, position: Array, row: Array, tokens: Array) -> Array:
        key_at = jax.random.fold_in(key, position)
        token_keys = jax.vmap(jax.random.fold_in, (None, 0))(key_at, tokens)
        return tokens[jnp.argmax(row + jax.vmap(jax.random.gumbel)(token_keys))]

    # Random numbers for k tokens only: for V they would take longer than a pass.
    best, tokens = jax.lax.top_k(logits, top_k)
    scaled = filtered(best, dataclasses.replace(options, top_k=None))
    among_nodes = jax.vmap(draw_among, (None, 0, 0, 0))
    drawn = jax.vmap(among_nodes)(keys, positions, scaled, tokens)
    return drawn.astype(jnp.int32)
