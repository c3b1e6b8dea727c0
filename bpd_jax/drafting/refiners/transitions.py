"""Refiners with finitely many states, which the exact search needs.

The score of a candidate may depend on a *node*: what the refiner must know of the path
before it. A refiner that sees one token back has W nodes at a position, an n-gram model
a few hundred. With finitely many nodes the P best of all W^(L-1) paths are found
exactly (`searches.finite`); greedy walks, beams and trees work on them too.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.drafting.interface import Extension, View
from bpd_jax.drafting.lattice import Drafts, Lattice
from bpd_jax.drafting.tree import take
from bpd_jax.typing import Array, Bool, Float, Int, PyTree


@flax.struct.dataclass
class Transitions:
    """Scores of all steps through a lattice; step j leads to position j + 1.

    Attributes:
      scores: what the refiner adds to the source's log-probability, weighted.
      following: the node that a step leads to.
      start: the node of the certain token.
      candidates: the candidate at position j that each node stands for, if the nodes
        tell their last candidate; None if they do not.
      overflow: rows in which a bounded search for nodes left some out; None if that
        cannot happen.
    """

    scores: Float[Array, "B L-1 N W"]
    following: Int[Array, "B L-1 N W"]
    start: Int[Array, " B"]
    candidates: Int[Array, "B L-1 N"] | None = None
    overflow: Bool[Array, " B"] | None = None


class FiniteRefiner(Protocol):
    """A refiner whose scores are `Transitions` of the lattice."""

    @property
    def arrays(self) -> PyTree:
        """What it reads on the device, or None."""
        ...

    def remember(self, arrays: PyTree, prompts: Any) -> PyTree:
        """The memory before the first serial call."""
        ...

    def inputs(
        self, view: View, lattice: Lattice, arrays: PyTree, memory: PyTree
    ) -> tuple[PyTree, PyTree]:
        """What it needs besides the lattice, as arrays with a row each; the memory."""
        ...

    def transitions(
        self,
        arrays: PyTree,
        lattice: Lattice,
        inputs: PyTree,
        *,
        by_candidate: bool,
        all_room: bool,
    ) -> Transitions:
        """Scores all steps of a lattice.

        Args:
          arrays: `self.arrays`.
          lattice: the candidates.
          inputs: from `inputs`.
          by_candidate: nodes must tell their last candidate, because the scores of
            other refiners are added.
          all_room: spend as much memory as no node is left out.
        """
        ...


class InputFree:
    """A `FiniteRefiner` that needs nothing but the lattice, and keeps nothing."""

    def remember(self, arrays: PyTree, prompts: Any) -> PyTree:
        """Keeps nothing."""
        del arrays, prompts

    def inputs(
        self, view: View, lattice: Lattice, arrays: PyTree, memory: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Needs nothing."""
        del view, lattice, arrays
        return None, memory


@flax.struct.dataclass
class Weight:
    """The weight α of a refiner at each head.

    α_j = max(0, level + slope · H_j), with H_j the entropy of head j + 1 in nats: a
    refiner may count for more where a head is uncertain. The paper names this as future
    work (appendix B.2). A slope of 0 is the paper's constant α.
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
    batch, length, _, width = scores.shape
    following = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), scores.shape)
    candidates = jnp.broadcast_to(
        jnp.arange(width, dtype=jnp.int32), (batch, length, width)
    )
    return Transitions(scores, following, jnp.zeros(batch, jnp.int32), candidates)


def of_candidates(scores: Float[Array, "B L-1 W"]) -> Transitions:
    """Scores that do not depend on the path at all: one node at every position."""
    batch = scores.shape[0]
    following = jnp.zeros((*scores.shape[:2], 1, scores.shape[2]), jnp.int32)
    return Transitions(scores[:, :, None], following, jnp.zeros(batch, jnp.int32))


def summed(parts: list[Transitions]) -> Transitions:
    """The sum of several refiners' scores.

    All but one must see at most one candidate back; the nodes of that one, which must
    tell their last candidate, are those of the sum.
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
    """The summed transitions of some refiners, one at least.

    Args:
      refiners: N refiners.
      arrays: of each.
      lattice: the candidates.
      inputs: of each.
      all_room: see `FiniteRefiner.transitions`.
    """
    several = len(refiners) > 1
    return summed(
        [
            refiner.transitions(
                array, lattice, one, by_candidate=several, all_room=all_room
            )
            for refiner, array, one in zip(refiners, arrays, inputs, strict=True)
        ]
    )


def over_lattice(
    refiners: Sequence[FiniteRefiner],
    arrays: Sequence[PyTree],
    lattice: Lattice,
    inputs: Sequence[PyTree],
    search: Callable[[Lattice, Transitions | None], Drafts],
    *,
    transitions: Transitions | None = None,
) -> Drafts:
    """Runs a search over a whole lattice under the sum of some refiners.

    Rows whose transitions lack nodes for want of room are searched again with enough of
    it. The second search is compiled in too, row by row, because of the memory that it
    takes.

    Args:
      refiners: N refiners; none leaves the search without transitions.
      arrays: of each.
      lattice: the candidates.
      inputs: of each.
      search: finds drafts from a lattice and transitions.
      transitions: from `all_transitions`, if they were computed before.
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
