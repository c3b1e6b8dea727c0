"""A trained recurrent network that reads the draft (Domino)."""

import dataclasses

import flax.struct

from bpd_jax.base.settings import setting
from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.drafting.draft_tree import take
from bpd_jax.drafting.interface import Extension, Refiner, Source, View
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.parts import BuildContext, RefinerPart, register
from bpd_jax.drafting.refiners.transitions import (
    ALPHA,
    SLOPE,
    TRAINED_ALPHA,
    Weight,
    WeightedParams,
)
from bpd_jax.models.attachment_files import LoadedRefiner
from bpd_jax.models.trained_refiners import (
    recurrent_scores,
    recurrent_start,
    recurrent_step,
)


@flax.struct.dataclass
class RecurrentState:
    """The states of n paths, and the weight at each head."""

    states: Float[Array, "B n R"]
    alpha: Float[Array, "B L-1"]


@dataclasses.dataclass(frozen=True)
class RecurrentRefiner(Refiner):
    """α times corrections of the logits that depend on the path."""

    arrays: WeightedParams = dataclasses.field(compare=False)

    def start(
        self, view: View, lattice: Lattice | None, arrays: WeightedParams, memory: None
    ) -> tuple[RecurrentState, None]:
        """Reads the hidden state and the certain token."""
        assert lattice is not None
        state = recurrent_start(arrays.params, view.model.states(view.hidden))
        states = recurrent_step(arrays.params, state, view.next_token)[:, None]
        return RecurrentState(states, arrays.alpha.at(lattice.entropies)), memory

    def scores(
        self,
        arrays: WeightedParams,
        state: RecurrentState,
        level: int,
        tokens: Int[Array, "B n W"],
    ) -> Float[Array, "B n W"]:
        """Weighted corrections of the logits."""
        alpha = state.alpha[:, level - 1, None, None]
        return alpha * recurrent_scores(arrays.params, state.states, tokens, level)

    def extend(
        self,
        arrays: WeightedParams,
        state: RecurrentState,
        level: int,
        extension: Extension,
    ) -> RecurrentState:
        """Reads the last tokens of the new paths."""
        before = take(state.states, extension.parents)
        states = recurrent_step(arrays.params, before, extension.tokens)
        return dataclasses.replace(state, states=states)


@register
@dataclasses.dataclass(frozen=True)
class Recurrent(RefinerPart):
    """Settings of the refiner `recurrent`."""

    name = "recurrent"
    title = "recurrent head"
    help = "a trained recurrent network along the draft"
    reference = "Domino 2026"
    needs = ("recurrent",)
    needs_hidden = True
    normalised = True

    alpha: float = setting(TRAINED_ALPHA, *ALPHA)
    slope: float = setting(0.0, *SLOPE)

    def build(self, context: BuildContext, source: Source) -> RecurrentRefiner:
        refiner: LoadedRefiner = context.need(self.name)
        weight = Weight.of(self.alpha, self.slope)
        return RecurrentRefiner(WeightedParams(weight, refiner.params))
