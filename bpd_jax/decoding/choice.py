"""How the model chooses a token: greedily, or by sampling with fixed noise.

The noise of a position depends on the row's key and on the position alone, not on
how the text was drafted. A sampled text is therefore the same, token for token, for
every drafting method, and distributed as plain sampling from the model: acceptance
needs no correction, because a draft token is kept only if it is the token that the
model itself draws there.
"""

import jax
import jax.numpy as jnp

from bpd_jax.typing import Array, Float, Int


def row_keys(seed: int, rows: Int[Array, " B"]) -> Array:
    """One key per prompt: the same for a prompt in whatever batch it is decoded."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows)


def choose(
    logits: Float[Array, "B M V"],
    positions: Int[Array, "B M"],
    keys: Array,
    temperature: float,
) -> Int[Array, "B M"]:
    """The model's choice of the token at each of `positions`.

    Args:
      logits: of the language model.
      positions: index in the text of the token that is chosen.
      keys: one per row.
      temperature: 0 takes the best token; otherwise tokens are drawn from
        softmax(logits / temperature) by the Gumbel-max rule.
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(key: Array, position: Array, row: Array) -> Array:
        noise = jax.random.gumbel(jax.random.fold_in(key, position), row.shape)
        return jnp.argmax(row / temperature + noise)

    over_nodes = jax.vmap(draw, (None, 0, 0))
    return jax.vmap(over_nodes)(keys, positions, logits).astype(jnp.int32)
