"""A small LM that rescores candidates (paper section 7.1).

The paper's Algorithm 2 conditions the small LM on the draft refined so far, and also
says "in parallel". `NeuralRefiner` implements the former, with one pass of the small LM
for each position of the block. `ParallelNeuralRefiner` implements the latter, with a
single pass over the best token of every head. Both add α · log r, where r is normalised
over the whole vocabulary.
"""

import dataclasses
from typing import Any

import flax.struct

from bpd_jax.base.settings import choice, setting
from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.drafting.interface import Extension, Prompts, Refiner, Source, View
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.parts import BuildContext, RefinerPart, register
from bpd_jax.drafting.refiners.transitions import (
    DEFAULT_ALPHA,
    SLOPE,
    FiniteRefiner,
    Transitions,
    Weight,
    WeightedParams,
    of_candidates,
)
from bpd_jax.drafting.small_lm import Reading, SmallLM
from bpd_jax.models.cache import KVCache

SEQUENTIAL, PARALLEL = MODES = ("sequential", "parallel")


@flax.struct.dataclass
class NeuralState:
    """State of the small LM at the ends of n paths, and the weight at each head."""

    reading: Reading
    alpha: Float[Array, "..."]


@dataclasses.dataclass(frozen=True)
class _SmallLMRefiner:
    """Base of the refiners with a small LM."""

    small: SmallLM
    arrays: WeightedParams = dataclasses.field(compare=False)

    def remember(self, arrays: WeightedParams, prompts: Prompts) -> KVCache:
        """Reads the prompts."""
        return self.small.prefill(arrays.params, prompts.tokens, prompts.lengths)


@dataclasses.dataclass(frozen=True)
class NeuralRefiner(_SmallLMRefiner, Refiner):
    """α · log r(y | text, path)."""

    def start(
        self,
        view: View,
        lattice: Lattice | None,
        arrays: WeightedParams,
        memory: KVCache,
    ) -> tuple[NeuralState, KVCache]:
        """Reads the accepted tokens and the certain token."""
        reading = self.small.start(arrays.params, memory, view)
        weight = arrays.alpha
        alpha = weight.level if lattice is None else weight.at(lattice.entropies)
        return NeuralState(reading, alpha), reading.cache

    def scores(
        self,
        arrays: WeightedParams,
        state: NeuralState,
        level: int,
        tokens: Int[Array, "B n W"],
    ) -> Float[Array, "B n W"]:
        """α · log r of each candidate."""
        alpha = state.alpha
        if alpha.ndim:
            alpha = alpha[:, level - 1, None, None]
        return alpha * self.small.scores(arrays.params, state.reading.hidden, tokens)

    def extend(
        self,
        arrays: WeightedParams,
        state: NeuralState,
        level: int,
        extension: Extension,
    ) -> NeuralState:
        """Reads the last tokens of the new paths."""
        reading = self.small.extend(arrays.params, state.reading, level, extension)
        return dataclasses.replace(state, reading=reading)


@dataclasses.dataclass(frozen=True)
class ParallelNeuralRefiner(_SmallLMRefiner, FiniteRefiner):
    """α · log r(y | text, unrefined draft).

    Its scores do not depend on the path, so that the exact search can be used.
    """

    def inputs(
        self, view: View, lattice: Lattice, arrays: WeightedParams, memory: KVCache
    ) -> tuple[Float[Array, "B L-1 W"], KVCache]:
        """Scores of all candidates, from one pass over the heads' best tokens."""
        draft = lattice.tokens[:, :-1, 0]
        hidden, memory, _ = self.small.read_on(arrays.params, memory, view, draft)
        scores = self.small.scores(arrays.params, hidden, lattice.tokens[:, 1:])
        alpha = arrays.alpha.at(lattice.entropies)[:, :, None]
        return alpha * scores, memory

    def transitions(
        self,
        arrays: WeightedParams,
        lattice: Lattice,
        inputs: Float[Array, "B L-1 W"],
        *,
        by_candidate: bool = False,
        all_room: bool = False,
    ) -> Transitions:
        """Transitions with a single node at every position."""
        return of_candidates(inputs)


@register
@dataclasses.dataclass(frozen=True)
class Neural(RefinerPart):
    """Settings of the refiner `neural`."""

    name = "neural"
    title = "neural"
    help = "a small LM, the paper's local rescoring"
    reference = "Kim et al. 2024, section 7.1, Algorithm 2"
    needs = ("rescorer",)
    reads_on = True

    alpha: float | None = setting(None, *DEFAULT_ALPHA)
    slope: float = setting(0.0, *SLOPE)
    mode: str = setting(
        SEQUENTIAL, f"how it reads the draft: {' or '.join(MODES)}", choice(*MODES)
    )

    @property
    def is_finite(self) -> bool:
        """In parallel mode, scores do not depend on the path."""
        return self.mode == PARALLEL

    def build(
        self, context: BuildContext, source: Source
    ) -> NeuralRefiner | ParallelNeuralRefiner:
        small: Any = context.need("rescorer")
        alpha = context.alpha if self.alpha is None else self.alpha
        arrays = WeightedParams(Weight.of(alpha, self.slope), small.params)
        reach = max(source.block_size, context.max_accepted)
        reader = SmallLM(small.sizes, reach, context.vocab_size)
        if self.mode == PARALLEL:
            return ParallelNeuralRefiner(reader, arrays)
        return NeuralRefiner(reader, arrays)
