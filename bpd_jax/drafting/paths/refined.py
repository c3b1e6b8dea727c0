"""The heads' candidates under a second opinion that sees the whole path.

Where a transition scorer knows of a path no more than one of finitely many nodes, these
carry a state along each path: the caches of a small LM, a recurrent network's vector.
No search over all paths is exact then, but greedy walks, beams and trees are at hand.
"""

import dataclasses
from typing import Any, Protocol

import flax.struct

from bpd_jax.drafting.interface import View
from bpd_jax.drafting.paths.interface import Candidates, Extension
from bpd_jax.drafting.paths.lattice import LatticePaths, LatticeState
from bpd_jax.drafting.transitions.interface import Weight
from bpd_jax.typing import Array, Float, Int, PyTree


class PathScorer(Protocol):
    """A second opinion with a state per path; a frozen dataclass, hence jit-static."""

    @property
    def arrays(self) -> PyTree:
        """What it reads on the device; handed to every other method."""
        ...

    def remember(
        self, arrays: PyTree, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> PyTree:
        """The memory before the first serial call; see `Drafter.start`."""
        ...

    def start(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The state of the one path that is the certain token; and the memory."""
        ...

    def scores(
        self, arrays: PyTree, state: PyTree, level: int, tokens: Int[Array, "B n W"]
    ) -> Float[Array, "B n W"]:
        """What it says of candidates at position `level` after each of n paths."""
        ...

    def extend(
        self, arrays: PyTree, state: PyTree, level: int, extension: Extension
    ) -> PyTree:
        """The state of the new paths, whose last token is at position `level`."""
        ...


@flax.struct.dataclass
class RefinedArrays:
    """What `RefinedPaths` reads on the device."""

    alpha: Weight
    lattice: PyTree
    scorer: PyTree


@flax.struct.dataclass
class RefinedState:
    """Where n paths stand, in the lattice and for the second opinion."""

    lattice: LatticeState
    scorer: Any
    alpha: Float[Array, "B L-1"]


@dataclasses.dataclass(frozen=True)
class RefinedPaths:
    """Scores log p_head + α · score (+ transitions, where the lattice has a scorer).

    Attributes:
      lattice: candidates of the heads.
      scorer: the second opinion.
      alpha: its weight.
    """

    lattice: LatticePaths
    scorer: PathScorer
    alpha: Weight = dataclasses.field(compare=False)

    @property
    def block_size(self) -> int:
        """L."""
        return self.lattice.block_size

    @property
    def width(self) -> int:
        """W."""
        return self.lattice.width

    @property
    def arrays(self) -> RefinedArrays:
        """Weights and tables of all opinions."""
        return RefinedArrays(self.alpha, self.lattice.arrays, self.scorer.arrays)

    def remember(
        self,
        arrays: RefinedArrays,
        tokens: Int[Array, "B S"],
        lengths: Int[Array, " B"],
    ) -> PyTree:
        """What the second opinion remembers: the lattice remembers nothing."""
        return self.scorer.remember(arrays.scorer, tokens, lengths)

    def start(
        self, view: View, arrays: RefinedArrays, memory: PyTree
    ) -> tuple[RefinedState, PyTree]:
        """Builds the lattice and starts the second opinion."""
        lattice, _ = self.lattice.start(view, arrays.lattice, None)
        state, memory = self.scorer.start(view, arrays.scorer, memory)
        alpha = arrays.alpha.at(lattice.lattice.entropies)
        return RefinedState(lattice, state, alpha), memory

    def candidates(
        self, arrays: RefinedArrays, state: RefinedState, level: int
    ) -> Candidates:
        """The head's candidates under all opinions."""
        offered = self.lattice.candidates(arrays.lattice, state.lattice, level)
        scores = self.scorer.scores(arrays.scorer, state.scorer, level, offered.tokens)
        alpha = state.alpha[:, level - 1, None, None]
        return Candidates(offered.tokens, offered.log_probs + alpha * scores)

    def extend(
        self,
        arrays: RefinedArrays,
        state: RefinedState,
        level: int,
        extension: Extension,
    ) -> RefinedState:
        """Both states move along."""
        return dataclasses.replace(
            state,
            lattice=self.lattice.extend(
                arrays.lattice, state.lattice, level, extension
            ),
            scorer=self.scorer.extend(arrays.scorer, state.scorer, level, extension),
        )

    def entropies(self, state: RefinedState) -> Float[Array, "B L"]:
        """Of the heads."""
        return self.lattice.entropies(state.lattice)
