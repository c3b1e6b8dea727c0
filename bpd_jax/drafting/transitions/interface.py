"""Transition scorers: second opinions on a lattice that need only finitely many states.

The score of a candidate may depend on a *node*: what the scorer must know of the path
before it. Scorers that see one token back have W nodes at a position, n-gram models a
few hundred. With finitely many nodes the P best of all W^(L-1) paths are found exactly
(`exact.best_paths`); greedy walks, beams and trees run on them too
(`bpd_jax.drafting.paths.lattice`).
"""

from typing import Protocol

import flax.struct
import jax.numpy as jnp

from bpd_jax.drafting.interface import View
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.typing import Array, Float, Int, PyTree


@flax.struct.dataclass
class Transitions:
    """Scores of all steps through a lattice; step j leads to position j + 1.

    Attributes:
      scores: what the second opinion adds to the head's log-probability, weighted.
      following: the node that a step leads to.
      start: the node of the certain token.
    """

    scores: Float[Array, "B L-1 N W"]
    following: Int[Array, "B L-1 N W"]
    start: Int[Array, " B"]


class TransitionScorer(Protocol):
    """A second opinion. Implementations are frozen dataclasses, hence jit-static."""

    @property
    def arrays(self) -> PyTree:
        """What it reads on the device, or None."""
        ...

    def transitions(self, arrays: PyTree, lattice: Lattice, view: View) -> Transitions:
        """Scores all steps of a lattice."""
        ...


@flax.struct.dataclass
class Weight:
    """The weight α of a second opinion at each head.

    α_j = max(0, level + slope · H_j), with H_j the entropy of head j + 1 in nats: where
    a head is unsure, the second opinion may count for more. The paper names this as
    future work (appendix B.2: the entropies of the heads may "inform how a rescoring LM
    should be interpolated with the block lattice weights"). A slope of 0 is the paper's
    constant α.
    """

    level: Float[Array, ""]
    slope: Float[Array, ""]

    @classmethod
    def of(cls, alpha: float, slope: float = 0.0) -> "Weight":
        """Puts the numbers on the device."""
        return cls(jnp.float32(alpha), jnp.float32(slope))

    def at(self, entropies: Float[Array, "B L"]) -> Float[Array, "B L-1"]:
        """α of heads 2 … L."""
        return jnp.maximum(self.level + self.slope * entropies[:, 1:], 0.0)


def between_candidates(scores: Float[Array, "B L-1 W W"]) -> Transitions:
    """Scores that see one candidate back: `scores[b, j, v, w]` of w after v.

    Worked example (W = 2): node v at a position is its candidate v; the certain token
    is candidate 0 of position 0.
    """
    batch, _, _, width = scores.shape
    following = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), scores.shape)
    return Transitions(scores, following, jnp.zeros(batch, jnp.int32))
