"""What the searches have in common: growing paths level by level."""

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.drafting.interface import Candidates, Extension
from bpd_jax.drafting.paths import Paths
from bpd_jax.drafting.tree import take
from bpd_jax.typing import Array, Float, Int, PyTree


@flax.struct.dataclass
class Level:
    """Paths that end at one position.

    Attributes:
      parents: index of the path of the level before that each continues.
      tokens: its last token.
      scores: summed log-probability; -inf for paths that do not exist.
    """

    parents: Int[Array, "B n"]
    tokens: Int[Array, "B n"]
    scores: Float[Array, "B n"]


def normalised(candidates: Candidates) -> Float[Array, "B n W"]:
    """Log-probabilities among the W candidates: they sum to 1 after every path.

    Refined scores are products of unequal experts; only so do they compare between
    paths of different lengths.
    """
    log_probs = jax.nn.log_softmax(candidates.log_probs, axis=-1)
    # Where nothing may follow, all are -inf, and their softmax is undefined.
    return jnp.where(jnp.isneginf(candidates.log_probs), -jnp.inf, log_probs)


def grow_best(
    paths: Paths,
    arrays: PyTree,
    state: PyTree,
    first: Int[Array, " B"],
    beam: int,
    *,
    normalise: bool,
) -> list[Level]:
    """Keeps the `beam` best paths of every length: one level per position.

    The best prefixes need not be prefixes of the best paths, so with a beam too small
    for all prefixes this is exact only for independent heads. A beam of 1 walks
    greedily (paper, Algorithm 2).

    Args:
      paths: source and refiners.
      arrays: its arrays.
      state: its first state.
      first: the certain token.
      beam: the most paths of a level.
      normalise: whether to normalise the candidates after every path.
    """
    batch = first.shape[0]
    levels = [
        Level(
            parents=jnp.full((batch, 1), -1, jnp.int32),
            tokens=first[:, None],
            scores=jnp.zeros((batch, 1)),
        )
    ]
    for position in range(1, paths.block_size):
        before = levels[-1]
        candidates = paths.candidates(arrays, state, position)
        steps = normalised(candidates) if normalise else candidates.log_probs
        totals = (before.scores[:, :, None] + steps).reshape(batch, -1)
        width = candidates.tokens.shape[-1]
        scores, chosen = jax.lax.top_k(totals, min(beam, totals.shape[1]))
        parents, picks = jnp.divmod(chosen, width)
        tokens = take(candidates.tokens.reshape(batch, -1), chosen)
        levels.append(Level(parents, tokens, scores))
        if position + 1 < paths.block_size:
            extension = Extension(parents, picks, tokens)
            state = paths.extend(arrays, state, position, extension)
    return levels
