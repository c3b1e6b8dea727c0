"""A small LM as a rescorer of the candidates (paper section 7.1).

The paper's Algorithm 2 conditions the small LM on the draft refined so far, and says
"in parallel". `NeuralRefiner` does the former: one pass of the small LM for each level
of the block. `ParallelNeuralRefiner` does the latter: one pass in all, over the best
token of every head. Both add α · log r, with r over the whole vocabulary.
"""

import dataclasses
from typing import Any, ClassVar

import flax.struct

from bpd_jax.drafting.interface import Extension, Prompts, Source, View
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.parts import BuildContext, RefinerPart, register
from bpd_jax.drafting.refiners.transitions import Transitions, Weight, of_candidates
from bpd_jax.drafting.refiners.weights import DEFAULT_ALPHA, SLOPE
from bpd_jax.drafting.small_lm import Reading, SmallLM
from bpd_jax.models.cache import KVCache
from bpd_jax.settings import choice, setting
from bpd_jax.typing import Array, Float, Int, Params

SEQUENTIAL, PARALLEL = MODES = ("sequential", "parallel")


@flax.struct.dataclass
class NeuralArrays:
    """What the refiner reads on the device."""

    alpha: Weight
    params: Params


@flax.struct.dataclass
class NeuralState:
    """What the small LM has read along n paths, and its weight at each level."""

    reading: Reading
    alpha: Float[Array, "..."]


@dataclasses.dataclass(frozen=True)
class NeuralRefiner:
    """α · log r(y | text, path).

    Attributes:
      small: the small LM.
      arrays: its parameters and weight.
    """

    small: SmallLM
    arrays: NeuralArrays = dataclasses.field(compare=False)

    def remember(self, arrays: NeuralArrays, prompts: Prompts) -> KVCache:
        """Reads the prompts."""
        return self.small.prefill(arrays.params, prompts.tokens, prompts.lengths)

    def start(
        self, view: View, lattice: Lattice | None, arrays: NeuralArrays, memory: KVCache
    ) -> tuple[NeuralState, KVCache]:
        """Catches up with the text."""
        reading = self.small.start(arrays.params, memory, view)
        alpha = arrays.alpha.level
        if lattice is not None:
            alpha = arrays.alpha.at(lattice.entropies)
        return NeuralState(reading, alpha), reading.cache

    def scores(
        self,
        arrays: NeuralArrays,
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
        arrays: NeuralArrays,
        state: NeuralState,
        level: int,
        extension: Extension,
    ) -> NeuralState:
        """Reads on along the new paths."""
        reading = self.small.extend(arrays.params, state.reading, level, extension)
        return dataclasses.replace(state, reading=reading)


@dataclasses.dataclass(frozen=True)
class ParallelNeuralRefiner:
    """α · log r(y | text, unrefined draft): a `FiniteRefiner`.

    Its scores do not depend on the path, so that every search over lattices, the exact
    one included, works on them.

    Attributes:
      small: the small LM.
      arrays: its parameters and weight.
    """

    small: SmallLM
    arrays: NeuralArrays = dataclasses.field(compare=False)

    def remember(self, arrays: NeuralArrays, prompts: Prompts) -> KVCache:
        """Reads the prompts."""
        return self.small.prefill(arrays.params, prompts.tokens, prompts.lengths)

    def inputs(
        self, view: View, lattice: Lattice, arrays: NeuralArrays, memory: KVCache
    ) -> tuple[Float[Array, "B L-1 W"], KVCache]:
        """Scores of all candidates, from one pass over the heads' best tokens."""
        draft = lattice.tokens[:, :-1, 0]
        hidden, memory, _ = self.small.read_on(arrays.params, memory, view, draft)
        scores = self.small.scores(arrays.params, hidden, lattice.tokens[:, 1:])
        alpha = arrays.alpha.at(lattice.entropies)[:, :, None]
        return alpha * scores, memory

    def transitions(
        self,
        arrays: NeuralArrays,
        lattice: Lattice,
        inputs: Float[Array, "B L-1 W"],
        *,
        by_candidate: bool = False,
        all_room: bool = False,
    ) -> Transitions:
        """The scores as transitions between single nodes."""
        del arrays, lattice, by_candidate, all_room
        return of_candidates(inputs)


@register
@dataclasses.dataclass(frozen=True)
class Neural(RefinerPart):
    """Settings of the refiner `neural`."""

    name: ClassVar[str] = "neural"
    help: ClassVar[str] = "a small LM, the paper's local rescoring"
    reference: ClassVar[str] = "Kim et al. 2024, section 7.1, Algorithm 2"
    needs: ClassVar[tuple[str, ...]] = ("rescorer",)

    alpha: float | None = setting(None, *DEFAULT_ALPHA)
    slope: float = setting(0.0, *SLOPE)
    mode: str = setting(
        SEQUENTIAL, f"how it reads the draft: {' or '.join(MODES)}", choice(*MODES)
    )

    @property
    def is_finite(self) -> bool:
        """In parallel, scores do not depend on the path."""
        return self.mode == PARALLEL

    def build(
        self, context: BuildContext, source: Source
    ) -> NeuralRefiner | ParallelNeuralRefiner:
        """Makes the refiner.

        Raises:
          UserError: there is no rescorer.
        """
        small: Any = context.need("rescorer")
        alpha = context.alpha if self.alpha is None else self.alpha
        arrays = NeuralArrays(Weight.of(alpha, self.slope), small.params)
        reader = SmallLM(small.functions, max(source.block_size, context.reach))
        if self.mode == PARALLEL:
            return ParallelNeuralRefiner(reader, arrays)
        return NeuralRefiner(reader, arrays)

    def label(self, order: int | None = None) -> str:
        """What people read in tables."""
        del order
        return "neural"
