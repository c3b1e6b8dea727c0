"""Refiners with finitely many states, for which there is an exact search.

The score of a candidate depends on a *node*, the state of the refiner after a path. A
refiner that depends on the previous token has W nodes at a position, an n-gram model a
few hundred. With finitely many nodes, the P best of all W^(L-1) paths can be found
exactly (`searches.best`). Greedy walks, beams and trees are supported too.

The weight α, here too, is that of all refiners.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.settings import number
from bpd_jax.base.typing import Array, Bool, Float, Int, PyTree
from bpd_jax.drafting.draft_tree import take
from bpd_jax.drafting.interface import Extension, View
from bpd_jax.drafting.lattice import Drafts, Lattice

# The weight of trained refiners in training.
TRAINED_ALPHA = 1.0

ALPHA = ("weight of its scores", number(0.0))
DEFAULT_ALPHA = ("weight of its scores; default --alpha", number(0.0).or_none())
SLOPE = ("increase of alpha per nat of the head's entropy", number(-1e6, 1e6))


@flax.struct.dataclass
class Weight:
    """The weight α of a refiner at each head.

    α_j = max(0, level + slope · H_j), where H_j is the entropy of head j + 1 in nats.
    With a positive slope the weight is larger where a head is uncertain, which the
    paper suggests as future work (appendix B.2). A slope of 0 is the paper's constant
    weight.
    """

    level: Float[Array, ""]
    slope: Float[Array, ""]

    @classmethod
    def of(cls, alpha: float, slope: float = 0.0) -> "Weight":
        """Converts the numbers to arrays."""
        return cls(*jax.device_put((np.float32(alpha), np.float32(slope))))

    def at(self, entropies: Float[Array, "B L"]) -> Float[Array, "B L-1"]:
        """α of heads 2 … L."""
        return jnp.maximum(self.level + self.slope * entropies[:, 1:], 0.0)


@flax.struct.dataclass
class WeightedParams:
    """The weight of a refiner's scores, and its parameters or table."""

    alpha: Weight
    params: PyTree


@flax.struct.dataclass
class Transitions:
    """Scores of all steps through a lattice; step j leads to position j + 1.

    Attributes:
      scores: weighted scores, which are added to the source's log-probabilities.
      following: the node that a step leads to.
      start: the node of the certain token.
      candidates: the last candidate of each node at position j; None if nodes do not
        determine it.
      overflow: rows that lack nodes because the number of nodes is limited; None if it
        is not.
    """

    scores: Float[Array, "B L-1 N W"]
    following: Int[Array, "B L-1 N W"]
    start: Int[Array, " B"]
    candidates: Int[Array, "B L-1 N"] | None = None
    overflow: Bool[Array, " B"] | None = None


class FiniteRefiner(abc.ABC):
    """A refiner whose scores are `Transitions` of a lattice.

    By default it has no memory, and no inputs besides the lattice.

    Attributes:
      arrays: arrays on the device, or None; passed to the other methods.
    """

    arrays: PyTree

    def remember(self, arrays: PyTree, prompts: Any) -> PyTree:
        """The memory before the first serial call."""
        return None

    def inputs(
        self, view: View, lattice: Lattice, arrays: PyTree, memory: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Its inputs besides the lattice, with an entry per row; and the memory."""
        return None, memory

    @abc.abstractmethod
    def transitions(
        self,
        arrays: PyTree,
        lattice: Lattice,
        inputs: PyTree,
        *,
        by_candidate: bool,
        all_room: bool,
    ) -> Transitions:
        """Transitions of a lattice.

        Args:
          inputs: result of `inputs`.
          by_candidate: whether nodes must determine their last candidate, because the
            scores of other refiners are added.
          all_room: whether to use enough memory for all nodes.
        """


def between_candidates(scores: Float[Array, "B L-1 W W"]) -> Transitions:
    """Transitions of scores of candidate pairs: `scores[b, j, v, w]` of w after v.

    Node v of a position is its candidate v; the certain token is candidate 0 of
    position 0.
    """
    batch, *_, width = scores.shape
    following = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), scores.shape)
    candidates = following[:, :, 0]
    return Transitions(scores, following, jnp.zeros(batch, jnp.int32), candidates)


def of_candidates(scores: Float[Array, "B L-1 W"]) -> Transitions:
    """Transitions of scores that do not depend on the path: one node per position."""
    batch = scores.shape[0]
    following = jnp.zeros((*scores.shape[:2], 1, scores.shape[2]), jnp.int32)
    return Transitions(scores[:, :, None], following, jnp.zeros(batch, jnp.int32))


def summed(parts: list[Transitions]) -> Transitions:
    """The sum of the scores of several refiners.

    The scores of all but one refiner must depend on at most the previous candidate. The
    nodes of the sum are those of that refiner, which must determine their last
    candidate.
    """
    total, *others = sorted(parts, key=lambda part: -part.scores.shape[2])
    for other in others:
        scores = other.scores
        if scores.shape[2] > 1:
            assert total.candidates is not None
            index = total.candidates[..., None]
            scores = jnp.take_along_axis(scores, index, axis=2)
        total = dataclasses.replace(total, scores=total.scores + scores)
    return total


@flax.struct.dataclass
class FiniteState:
    """The nodes of n paths."""

    transitions: Transitions
    nodes: Int[Array, "B n"]

    def scores(self, level: int) -> Float[Array, "B n W"]:
        """Scores of the candidates at position `level`."""
        return take(self.transitions.scores[:, level - 1], self.nodes)

    def extended(self, level: int, extension: Extension) -> "FiniteState":
        """The nodes of the new paths, whose last token is at position `level`."""
        following = self.transitions.following[:, level - 1]
        width = following.shape[-1]
        index = take(self.nodes, extension.parents) * width + extension.picks
        flat = following.reshape(following.shape[0], -1)
        return dataclasses.replace(self, nodes=take(flat, index))


def all_transitions(
    refiners: Sequence[FiniteRefiner],
    arrays: Sequence[PyTree],
    lattice: Lattice,
    inputs: Sequence[PyTree],
    *,
    all_room: bool = False,
) -> Transitions:
    """The sum of the transitions of one or more refiners.

    Args:
      all_room: see `FiniteRefiner.transitions`.
    """
    room = {"by_candidate": len(refiners) > 1, "all_room": all_room}
    triples = zip(refiners, arrays, inputs, strict=True)
    return summed([r.transitions(a, lattice, of_r, **room) for r, a, of_r in triples])


def over_lattice(
    refiners: Sequence[FiniteRefiner],
    arrays: Sequence[PyTree],
    lattice: Lattice,
    inputs: Sequence[PyTree],
    search: Callable[[Lattice, Transitions | None], Drafts],
    *,
    transitions: Transitions | None = None,
) -> Drafts:
    """Runs a search over a lattice under the sum of refiners.

    Rows whose transitions lack nodes are searched again with enough memory for all
    nodes, one row after the other.

    Args:
      refiners: the refiners; without refiners, transitions are None.
      search: returns drafts from a lattice and transitions.
      transitions: result of `all_transitions`, if it was computed before.
    """
    if not refiners:
        return search(lattice, None)
    if transitions is None:
        transitions = all_transitions(refiners, arrays, lattice, inputs)
    first = search(lattice, transitions)
    if transitions.overflow is None:
        return first

    def search_row(row: tuple[Any, ...]) -> Drafts:
        missed, drafts, one_lattice, one_inputs = row

        def again(_: Drafts) -> Drafts:
            block, text = jax.tree.map(lambda x: x[None], (one_lattice, one_inputs))
            steps = all_transitions(refiners, arrays, block, text, all_room=True)
            return jax.tree.map(lambda x: x[0], search(block, steps))

        return jax.lax.cond(missed, again, lambda drafts: drafts, drafts)

    def with_all_room(drafts: Drafts) -> Drafts:
        rows = (transitions.overflow, drafts, lattice, tuple(inputs))
        return jax.lax.map(search_row, rows)

    overflow = transitions.overflow.any()
    return jax.lax.cond(overflow, with_all_room, lambda drafts: drafts, first)
