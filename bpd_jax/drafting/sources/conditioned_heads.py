"""Block heads that also read the certain token and outputs of a few layers."""

import dataclasses

import jax.numpy as jnp

from bpd_jax.drafting.interface import Outcome, Prompts, View
from bpd_jax.drafting.lattice import Lattice, build_lattice
from bpd_jax.drafting.sources.heads import LatticeSource
from bpd_jax.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class ConditionedHeadsSource(LatticeSource):
    """The W best tokens of each of heads 2 … L (`BlockHeadsConfig.reads_anchor`).

    Its memory is `[B, F]`, the outputs of the layers at the last accepted token.

    Attributes:
      block_size: L, the number of heads used.
      width: W, candidates per head.
      feature_layers: those that the heads read; there may be none.
    """

    block_size: int
    width: int
    feature_layers: tuple[int, ...] = ()

    def remember(self, arrays: None, prompts: Prompts) -> Float[Array, "B F"] | None:
        """The outputs at the last token of every prompt."""
        del arrays
        return _at(prompts.features, prompts.lengths - 1)

    def build_lattice(
        self, view: View, arrays: None, memory: Float[Array, "B F"] | None
    ) -> tuple[Lattice, Float[Array, "B F"] | None]:
        """Evaluates the heads."""
        del arrays
        model = view.model
        candidates = model.functions.block_candidates(
            model.params,
            view.hidden,
            self.block_size,
            self.width,
            view.next_token,
            memory,
        )
        return build_lattice(view.next_token, *candidates), memory

    def learn(
        self, arrays: None, memory: Float[Array, "B F"] | None, outcome: Outcome
    ) -> Float[Array, "B F"] | None:
        """The outputs at the last accepted token; finished rows keep theirs."""
        del arrays
        last = _at(outcome.features, outcome.count - 1)
        if last is None or memory is None:
            return memory
        return jnp.where(outcome.count[:, None] > 0, last, memory)


def _at(
    features: Float[Array, "B T F"] | None, places: Int[Array, " B"]
) -> Float[Array, "B F"] | None:
    if features is None:
        return None
    places = jnp.maximum(places, 0)[:, None, None]
    return jnp.take_along_axis(features, places, axis=1)[:, 0]
