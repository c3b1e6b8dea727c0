"""The drafter that is composed of a source, refiners and a search.

`Paths` adds the scores of the refiners to those of the source; searches build drafts
from it. `PathDrafter` joins it and a search to a `Drafter`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct

from bpd_jax.base.typing import Array, Float, Int, PyTree
from bpd_jax.drafting.draft_tree import DraftTree
from bpd_jax.drafting.interface import (
    Candidates,
    Drafter,
    Extension,
    Outcome,
    Prompts,
    Refiner,
    Search,
    Source,
    View,
)
from bpd_jax.drafting.lattice import Lattice, covered
from bpd_jax.drafting.refiners.transitions import (
    FiniteRefiner,
    FiniteState,
    all_transitions,
)


@flax.struct.dataclass
class PathArrays:
    """The arrays of a source and its refiners."""

    source: Any
    finite: tuple[Any, ...]
    others: tuple[Any, ...]


@flax.struct.dataclass
class PathState:
    """The state of n paths.

    Attributes:
      inputs: inputs of the finite refiners.
      finite: the sum of their transitions, and the nodes of the paths; None without
        finite refiners.
    """

    source: Any
    lattice: Lattice | None
    inputs: tuple[Any, ...]
    finite: FiniteState | None
    others: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Paths:
    """log p_source + Σ weighted scores of the refiners (paper section 7).

    Attributes:
      finite: refiners with finitely many states, which need a lattice source.
      others: refiners with a state for each path.
    """

    source: Source
    finite: tuple[FiniteRefiner, ...] = ()
    others: tuple[Refiner, ...] = ()

    @property
    def block_size(self) -> int:
        """L."""
        return self.source.block_size

    @property
    def width(self) -> int:
        """W."""
        return self.source.width

    @property
    def arrays(self) -> PathArrays:
        """The arrays of all parts."""
        return PathArrays(
            self.source.arrays,
            tuple(refiner.arrays for refiner in self.finite),
            tuple(refiner.arrays for refiner in self.others),
        )

    def remember(self, arrays: PathArrays, prompts: Prompts) -> PathArrays:
        """The memories of all parts, with the structure of `arrays`."""

        def each(refiners: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
            pairs = zip(refiners, arrays, strict=True)
            return tuple(refiner.remember(array, prompts) for refiner, array in pairs)

        return PathArrays(
            self.source.remember(arrays.source, prompts),
            each(self.finite, arrays.finite),
            each(self.others, arrays.others),
        )

    def learn(
        self, arrays: PathArrays, memory: PathArrays, outcome: Outcome
    ) -> PathArrays:
        """Updates the memory of the source; refiners read the text in `start`."""
        source = self.source.learn(arrays.source, memory.source, outcome)
        return dataclasses.replace(memory, source=source)

    def start(
        self, view: View, arrays: PathArrays, memory: PathArrays
    ) -> tuple[PathState, PathArrays]:
        """The state of the one path that is the certain token; and the memory."""
        source, source_memory = self.source.start(view, arrays.source, memory.source)
        lattice = self.source.lattice(source)
        inputs, finite_memory, finite = (), (), None
        if self.finite:
            assert lattice is not None
            triples = zip(self.finite, arrays.finite, memory.finite, strict=True)
            started = [r.inputs(view, lattice, array, old) for r, array, old in triples]
            inputs, finite_memory = zip(*started, strict=True)
            transitions = all_transitions(self.finite, arrays.finite, lattice, inputs)
            finite = FiniteState(transitions, transitions.start[:, None])
        others, others_memory = (), ()
        if self.others:
            each = zip(self.others, arrays.others, memory.others, strict=True)
            states = [r.start(view, lattice, array, old) for r, array, old in each]
            others, others_memory = zip(*states, strict=True)
        return (
            PathState(source, lattice, inputs, finite, others),
            PathArrays(source_memory, finite_memory, others_memory),
        )

    def candidates(
        self, arrays: PathArrays, state: PathState, level: int
    ) -> Candidates:
        """Candidates of the source with the sums of all scores."""
        candidates = self.source.candidates(arrays.source, state.source, level)
        tokens, scores = candidates.tokens, candidates.log_probs
        if state.finite is not None:
            scores = scores + state.finite.scores(level)
        others = zip(self.others, arrays.others, state.others, strict=True)
        for refiner, array, of_refiner in others:
            scores = scores + refiner.scores(array, of_refiner, level, tokens)
        return Candidates(tokens, scores)

    def covered(
        self, arrays: PathArrays, state: PathState, level: int
    ) -> Float[Array, "B n"]:
        """Logarithm of the probability that the source gives to all candidates."""
        candidates = self.source.candidates(arrays.source, state.source, level)
        return covered(candidates.log_probs)

    def extend(
        self, arrays: PathArrays, state: PathState, level: int, extension: Extension
    ) -> PathState:
        """The states of all parts for the new paths."""
        triples = zip(self.others, arrays.others, state.others, strict=True)
        others = [
            refiner.extend(array, of_refiner, level, extension)
            for refiner, array, of_refiner in triples
        ]
        return dataclasses.replace(
            state,
            source=self.source.extend(arrays.source, state.source, level, extension),
            finite=state.finite and state.finite.extended(level, extension),
            others=tuple(others),
        )


# The initial state of the paths, the certain token and the random keys.
PathStart = tuple[PathState, Int[Array, " B"], Array]


@dataclasses.dataclass(frozen=True)
class PathDrafter(Drafter):
    """A drafter that runs a search on paths."""

    paths: Paths
    search: Search

    @property
    def max_depth(self) -> int:
        """L."""
        return self.paths.block_size

    @property
    def max_nodes(self) -> int:
        return self.search.max_nodes(self.paths.block_size, self.paths.width)

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        return self.search.pass_sizes(self.paths.block_size, self.paths.width)

    @property
    def max_drafts(self) -> int:
        return self.search.max_drafts(self.paths.block_size, self.paths.width)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.paths.source.feature_layers

    @property
    def arrays(self) -> PyTree:
        """The arrays of the source and the refiners."""
        return self.paths.arrays

    def start(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        """The memory of the source and the refiners."""
        return self.paths.remember(arrays, prompts)

    def look(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[PathStart, PyTree]:
        """Starts the source and the refiners."""
        state, memory = self.paths.start(view, arrays, memory)
        return (state, view.next_token, view.keys), memory

    def propose(self, seen: PathStart, arrays: PyTree) -> DraftTree:
        """Runs the search."""
        return self.search.grow(self.paths, arrays, *seen)

    def learn(self, arrays: PyTree, memory: PyTree, outcome: Outcome) -> PyTree:
        """The memory after a serial call."""
        return self.paths.learn(arrays, memory, outcome)

    def entropies(self, seen: PathStart) -> Float[Array, "B L"] | None:
        """Entropies of the heads; None without a lattice."""
        lattice = seen[0].lattice
        return None if lattice is None else lattice.entropies
