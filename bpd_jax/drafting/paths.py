"""A source under the sum of its refiners: what every search grows drafts from."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct

from bpd_jax.drafting.interface import (
    Candidates,
    Extension,
    Outcome,
    Prompts,
    Refiner,
    Source,
    View,
)
from bpd_jax.drafting.lattice import Drafts, Lattice
from bpd_jax.drafting.refiners.transitions import (
    FiniteRefiner,
    FiniteState,
    Transitions,
    all_transitions,
    over_lattice,
)
from bpd_jax.typing import Array, Float


@flax.struct.dataclass
class PathArrays:
    """What a source and its refiners read on the device."""

    source: Any
    finite: tuple[Any, ...]
    others: tuple[Any, ...]


@flax.struct.dataclass
class PathState:
    """The state of n paths.

    Attributes:
      source: of the source.
      lattice: the source's, if it has one.
      inputs: of the finite refiners.
      finite: their summed transitions and the nodes of the paths; None without any.
      others: states of the other refiners.
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
      source: of the candidates.
      finite: refiners with finitely many states; they need a lattice source.
      others: refiners that carry a state of their own along each path.
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
    def feature_layers(self) -> tuple[int, ...]:
        """Those of the source."""
        return self.source.feature_layers

    @property
    def arrays(self) -> PathArrays:
        """Those of all parts."""
        return PathArrays(
            self.source.arrays,
            tuple(refiner.arrays for refiner in self.finite),
            tuple(refiner.arrays for refiner in self.others),
        )

    def remember(self, arrays: PathArrays, prompts: Prompts) -> PathArrays:
        """The memories of all parts, in the same structure as `arrays`."""
        return PathArrays(
            self.source.remember(arrays.source, prompts),
            tuple(
                refiner.remember(array, prompts)
                for refiner, array in zip(self.finite, arrays.finite, strict=True)
            ),
            tuple(
                refiner.remember(array, prompts)
                for refiner, array in zip(self.others, arrays.others, strict=True)
            ),
        )

    def learn(
        self, arrays: PathArrays, memory: PathArrays, outcome: Outcome
    ) -> PathArrays:
        """The source learns; refiners read the text when they start."""
        source = self.source.learn(arrays.source, memory.source, outcome)
        return dataclasses.replace(memory, source=source)

    def start(
        self, view: View, arrays: PathArrays, memory: PathArrays
    ) -> tuple[PathState, PathArrays]:
        """The state of the one path that is the certain token; and the memory."""
        source, source_memory = self.source.start(view, arrays.source, memory.source)
        lattice = self.source.lattice(source)
        inputs, finite_memory = [], []
        for refiner, array, kept in zip(
            self.finite, arrays.finite, memory.finite, strict=True
        ):
            assert lattice is not None
            one, kept = refiner.inputs(view, lattice, array, kept)
            inputs.append(one)
            finite_memory.append(kept)
        finite = None
        if lattice is not None and self.finite:
            transitions = all_transitions(
                self.finite, arrays.finite, lattice, tuple(inputs)
            )
            finite = FiniteState(transitions, transitions.start[:, None])
        others, others_memory = [], []
        for path_refiner, array, kept in zip(
            self.others, arrays.others, memory.others, strict=True
        ):
            state, kept = path_refiner.start(view, lattice, array, kept)
            others.append(state)
            others_memory.append(kept)
        return (
            PathState(source, lattice, tuple(inputs), finite, tuple(others)),
            PathArrays(source_memory, tuple(finite_memory), tuple(others_memory)),
        )

    def candidates(
        self, arrays: PathArrays, state: PathState, level: int
    ) -> Candidates:
        """The source's candidates under all scores."""
        offered = self.source.candidates(arrays.source, state.source, level)
        scores = offered.log_probs
        if state.finite is not None:
            scores = scores + state.finite.scores(level)
        for refiner, array, one in zip(
            self.others, arrays.others, state.others, strict=True
        ):
            scores = scores + refiner.scores(array, one, level, offered.tokens)
        return Candidates(offered.tokens, scores)

    def extend(
        self, arrays: PathArrays, state: PathState, level: int, extension: Extension
    ) -> PathState:
        """The states of all parts."""
        others = tuple(
            refiner.extend(array, one, level, extension)
            for refiner, array, one in zip(
                self.others, arrays.others, state.others, strict=True
            )
        )
        source = self.source.extend(arrays.source, state.source, level, extension)
        finite = state.finite
        if finite is not None:
            finite = finite.extended(level, extension)
        return dataclasses.replace(state, source=source, finite=finite, others=others)

    def entropies(self, state: PathState) -> Float[Array, "B L"] | None:
        """Those of the lattice."""
        return None if state.lattice is None else state.lattice.entropies

    def over_lattice(
        self,
        arrays: PathArrays,
        state: PathState,
        search: Callable[[Lattice, Transitions | None], Drafts],
    ) -> Drafts:
        """Runs a search over the whole lattice; see `transitions.over_lattice`.

        Args:
          arrays: those of all parts.
          state: the first one.
          search: finds drafts from a lattice and transitions.
        """
        assert state.lattice is not None
        assert not self.others
        transitions = None if state.finite is None else state.finite.transitions
        return over_lattice(
            self.finite,
            arrays.finite,
            state.lattice,
            state.inputs,
            search,
            transitions=transitions,
        )
