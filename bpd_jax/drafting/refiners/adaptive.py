"""A cache over the text so far: bigrams of prompt and output, mixed into a model.

Names, numbers and turns of phrase come back within a text. A bigram cache counts them
where they stand, in the tokens on the device, for just the W × W pairs of candidates
that a lattice asks for: one matrix product per position, and nothing to maintain.
"""

import jax.numpy as jnp

from bpd_jax.typing import Array, Float, Int

# How many sightings of a token make its own successors count as much as the model's.
STRENGTH = 1.0


def cache_counts(
    candidates: Int[Array, "B L W"],
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B L-1 W W+1"]:
    """How often the text has candidate w right after candidate v one position before.

    The last entry of each row counts v itself where something follows it. The certain
    token, which is about to end the text, counts as what follows the last one.
    """
    places, last = jnp.arange(tokens.shape[1]), lengths[:, None]
    tokens = jnp.where(places == last, candidates[:, 0, :1], tokens)
    inside = places <= last
    before = (candidates[:, :-1, :, None] == tokens[:, None, None]) & inside[
        :, None, None
    ]
    after = (candidates[:, 1:, :, None] == tokens[:, None, None]) & inside[
        :, None, None
    ]
    followed = before[..., :-1] & inside[:, None, None, 1:]
    pairs = jnp.einsum(
        "BLVS,BLWS->BLVW",
        followed.astype(jnp.float32),
        after[..., 1:].astype(jnp.float32),
    )
    totals = followed.sum(-1, dtype=jnp.float32)
    return jnp.concatenate([pairs, totals[..., None]], axis=-1)


def mixed(
    log_probs: Float[Array, "B J N W"], counts: Float[Array, "B J N W+1"]
) -> Float[Array, "B J N W"]:
    """log((1 - λ) p + λ c(v w) / c(v)), with λ = c(v) / (c(v) + STRENGTH).

    Args:
      log_probs: of the model.
      counts: what the text says of each node's last token v; see `cache_counts`.
    """
    total = counts[..., -1:]
    # As logarithms, because float32 does not hold the smallest probabilities.
    seen = jnp.logaddexp(jnp.log(STRENGTH) + log_probs, jnp.log(counts[..., :-1]))
    return seen - jnp.log(STRENGTH + total)
