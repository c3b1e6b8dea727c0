"""A smaller model that writes the draft (Leviathan et al. 2023; Chen et al. 2023)."""

import dataclasses

from bpd_jax.drafting.interface import View
from bpd_jax.drafting.paths.interface import Candidates, Extension
from bpd_jax.drafting.paths.small_lm import Reading, SmallLM
from bpd_jax.drafting.searches.topology import Topology
from bpd_jax.models.cache import KVCache
from bpd_jax.models.functions import top_candidates
from bpd_jax.typing import Array, Int, Params


@dataclasses.dataclass(frozen=True)
class DraftModelPaths:
    """Candidates are the draft model's own best next tokens after each path.

    Attributes:
      block_size: L, the draft tokens and the certain one.
      width: W, tokens kept of each of its distributions.
      small: the draft model.
      params: its parameters.
    """

    block_size: int
    width: int
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

    def candidates(self, arrays: Params, state: Reading, level: int) -> Candidates:
        """The best tokens, with their log-probabilities."""
        del level
        logits = self.small.logits(arrays, state.hidden)
        tokens, log_probs, _ = top_candidates(logits, self.width)
        return Candidates(tokens, log_probs)

    def extend(
        self, arrays: Params, state: Reading, level: int, extension: Extension
    ) -> Reading:
        """Reads on along the new paths."""
        return self.small.extend(arrays, state, level, extension)

    def entropies(self, state: Reading) -> None:
        """Has no heads."""
        del state


def parallel_chains(count: int, length: int) -> Topology:
    """`count` different first draft tokens, each continued by a chain.

    Worked example, `parallel_chains(2, 3)`: (0), (0 0), (0 0 0), (1), (1 0), (1 0 0).
    """
    return Topology.of(
        [
            (first, *[0] * (depth - 1))
            for first in range(count)
            for depth in range(1, length + 1)
        ]
    )
