"""A bigram cache of prompt and output, interpolated with an n-gram model.

Names, numbers and phrases recur within a text. The cache counts bigrams directly in the
tokens on the device, for the W × W pairs of candidates of a lattice: one matrix product
per position, without state.
"""

import jax.numpy as jnp

from bpd_jax.typing import Array, Float, Int

# Number of occurrences of a token at which the cache and the model have equal weights.
STRENGTH = 1.0


def cache_counts(
    candidates: Int[Array, "B L W"],
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B L-1 W W+1"]:
    """Counts of the bigrams of candidate v and candidate w at the next position.

    The last entry of each row is the count of v, except at the end of the text. The
    certain token counts as part of the text.
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
      log_probs: log-probabilities of the model.
      counts: counts of each node's last token v; see `cache_counts`.
    """
    total = counts[..., -1:]
    # In logarithms, because the smallest probabilities underflow in float32.
    seen = jnp.logaddexp(jnp.log(STRENGTH) + log_probs, jnp.log(counts[..., :-1]))
    return seen - jnp.log(STRENGTH + total)
