"""A small LM as second opinion on the heads' candidates (paper section 7.1).

The paper's Algorithm 2 conditions the small LM on the draft refined so far, and says
"in parallel". `NeuralScorer` does the former: one pass of the small LM for each level
of the block. `ParallelNeuralPaths` does the latter: one pass in all, over every head's
own best token. Both count with α · log r, r over the whole vocabulary.
"""

import dataclasses

import flax.struct

from bpd_jax.drafting.interface import View
from bpd_jax.drafting.paths.interface import Extension
from bpd_jax.drafting.paths.lattice import LatticePaths, LatticeState
from bpd_jax.drafting.paths.small_lm import Reading, SmallLM
from bpd_jax.drafting.transitions.interface import Weight
from bpd_jax.models.cache import KVCache
from bpd_jax.typing import Array, Float, Int, Params, PyTree


@dataclasses.dataclass(frozen=True)
class NeuralScorer:
    """log r(y | text, path): a `PathScorer`.

    Attributes:
      small: the small LM.
      params: its parameters.
    """

    small: SmallLM
    params: Params = dataclasses.field(compare=False)

    @property
    def arrays(self) -> Params:
        """The parameters."""
        return self.params

    def remember(
        self, arrays: Params, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> KVCache:
        """Reads the prompts."""
        return self.small.prefill(arrays, tokens, lengths)

    def start(
        self, view: View, arrays: Params, memory: KVCache
    ) -> tuple[Reading, KVCache]:
        """Catches up with the text."""
        reading = self.small.start(arrays, memory, view)
        return reading, reading.cache

    def scores(
        self,
        arrays: Params,
        state: Reading,
        level: int,
        tokens: Int[Array, "B n W"],
    ) -> Float[Array, "B n W"]:
        """log r of each candidate."""
        del level
        return self.small.scores(arrays, state.hidden, tokens)

    def extend(
        self, arrays: Params, state: Reading, level: int, extension: Extension
    ) -> Reading:
        """Reads on along the new paths."""
        return self.small.extend(arrays, state, level, extension)


@flax.struct.dataclass
class ParallelArrays:
    """What `ParallelNeuralPaths` reads on the device."""

    alpha: Weight
    lattice: PyTree
    params: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelNeuralPaths(LatticePaths):
    """The lattice refined at once: log p_head + α · log r(y | text, unrefined draft).

    What a candidate gets does not depend on the path, so that this is a lattice again
    and every search over lattices, the exact one included, works on it.

    Attributes:
      small: the small LM.
      params: its parameters.
      alpha: its weight.
    """

    small: SmallLM
    params: Params = dataclasses.field(compare=False)
    alpha: Weight = dataclasses.field(compare=False)

    @property
    def arrays(self) -> ParallelArrays:
        """Parameters, weight, and the arrays of the lattice's own scorer."""
        return ParallelArrays(self.alpha, super().arrays, self.params)

    def remember(
        self,
        arrays: ParallelArrays,
        tokens: Int[Array, "B S"],
        lengths: Int[Array, " B"],
    ) -> KVCache:
        """Reads the prompts."""
        return self.small.prefill(arrays.params, tokens, lengths)

    def start(
        self, view: View, arrays: ParallelArrays, memory: KVCache
    ) -> tuple[LatticeState, KVCache]:
        """Builds the lattice, reads the draft of the heads' best tokens, refines."""
        state, _ = super().start(view, arrays.lattice, None)
        lattice = state.lattice
        draft = lattice.tokens[:, :-1, 0]
        hidden, memory, _ = self.small.read_on(arrays.params, memory, view, draft)
        opinion = self.small.scores(arrays.params, hidden, lattice.tokens[:, 1:])
        alpha = arrays.alpha.at(lattice.entropies)[:, :, None]
        scores = state.scores.at[:, 1:].add(alpha * opinion)
        lattice = dataclasses.replace(lattice, log_probs=scores)
        return dataclasses.replace(state, lattice=lattice, scores=scores), memory
