"""How the model chooses a token: greedily, or by sampling with fixed noise.

The noise of a position depends on the row's key and on the position alone, not on
how the text was drafted. A sampled text is therefore the same, token for token, for
every drafting method, and distributed as plain sampling from the model: acceptance
needs no correction, because a draft token is kept only if it is the token that the
model itself draws there.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bpd_jax.decoding.options import StepOptions
from bpd_jax.typing import Array, Float, Int

# Streams of noise: draws of drafts and of acceptance must not share the noise by
# which the model chooses.
DRAFTS, ACCEPTANCE = 1, 2


def row_keys(seed: int, rows: Int[Array, " B"]) -> Array:
    """One key per prompt: the same for a prompt in whatever batch it is decoded."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows)


def stream_keys(keys: Array, positions: Int[Array, " B"], stream: int) -> Array:
    """One key per row for another kind of noise at a position of the text."""

    def key_at(key: Array, position: Array) -> Array:
        # Choices fold in the position alone, which is never negative.
        stream_key = jax.random.fold_in(key, jnp.uint32(2**32 - stream))
        return jax.random.fold_in(stream_key, position)

    return jax.vmap(key_at)(keys, positions)


def filtered(
    logits: Float[Array, "... V"], options: StepOptions
) -> Float[Array, "... V"]:
    """Logits divided by the temperature; tokens that top-k or top-p drop are -inf.

    Top-k comes first, then top-p of what is left, as in Hugging Face's generate. Top-k
    keeps k tokens, of equal logits at the edge those with the lowest ids; top-p keeps
    equal logits at its edge together.

    Args:
      logits: of the language model.
      options: with a temperature above 0.
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
        # A token stays if those before it have less than top_p together.
        before = jnp.cumsum(probs, axis=-1) - probs
        count = (before < options.top_p).sum(-1, keepdims=True)
        lowest = jnp.take_along_axis(ordered, count - 1, axis=-1)
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
    return logits


def choose(
    logits: Float[Array, "B M V"],
    positions: Int[Array, "B M"],
    keys: Array,
    options: StepOptions,
) -> Int[Array, "B M"]:
    """The model's choice of the token at each of `positions`.

    Args:
      logits: of the language model.
      positions: index in the text of the token that is chosen.
      keys: one per row.
      options: temperature 0 takes the best token; otherwise tokens are drawn from
        the softmax of `filtered` logits by the Gumbel-max rule. With top-k the noise
        of a token depends on the row's key, the position and the token, not on its
        rank: tokens of nearly equal logits that change places keep theirs.
    """
    if options.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

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

    # Noise for k tokens, not for V, which would take longer than a forward pass.
    best, tokens = jax.lax.top_k(logits, top_k)
    scaled = filtered(best, dataclasses.replace(options, top_k=None))
    among_nodes = jax.vmap(draw_among, (None, 0, 0, 0))
    drawn = jax.vmap(among_nodes)(keys, positions, scaled, tokens)
    return drawn.astype(jnp.int32)
