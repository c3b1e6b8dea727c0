"""A trained low-rank bigram model: the Markov head of DSpark, DFlash2's selector."""

import dataclasses

import jax
import jax.numpy as jnp

from bpd_jax.base.settings import setting
from bpd_jax.drafting.interface import Source
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.parts import BuildContext, RefinerPart, register
from bpd_jax.drafting.refiners.transitions import (
    ALPHA,
    SLOPE,
    TRAINED_ALPHA,
    FiniteRefiner,
    Transitions,
    Weight,
    WeightedParams,
    between_candidates,
)
from bpd_jax.models.attachment_files import LoadedRefiner
from bpd_jax.models.trained_refiners import markov_scores


@dataclasses.dataclass(frozen=True)
class MarkovRefiner(FiniteRefiner):
    """α times corrections of the logits that depend on the previous token."""

    arrays: WeightedParams = dataclasses.field(compare=False)

    def transitions(
        self,
        arrays: WeightedParams,
        lattice: Lattice,
        inputs: None,
        *,
        by_candidate: bool = True,
        all_room: bool = False,
    ) -> Transitions:
        """Scores all W × W pairs of candidates at each position."""
        tokens = lattice.tokens
        levels = jnp.arange(1, tokens.shape[1])
        score = jax.vmap(markov_scores, in_axes=(None, 1, 1, 0, 1), out_axes=1)
        scores = score(
            arrays.params,
            tokens[:, :-1],
            tokens[:, 1:, None],
            levels,
            lattice.factors,
        )
        alpha = arrays.alpha.at(lattice.entropies)[:, :, None, None]
        return between_candidates(alpha * scores)


@register
@dataclasses.dataclass(frozen=True)
class Markov(RefinerPart):
    """Settings of the refiner `markov`."""

    name = "markov"
    title = "Markov head"
    help = "a trained low-rank bigram"
    reference = "DSpark 2026; DFlash2 2026"
    needs = ("markov",)
    finite = True
    normalised = True

    alpha: float = setting(TRAINED_ALPHA, *ALPHA)
    slope: float = setting(0.0, *SLOPE)

    def build(self, context: BuildContext, source: Source) -> MarkovRefiner:
        """Builds the refiner, from the Markov head of a block drafter if it has one."""
        drafter = context.assets.drafter
        if source.is_block_drafter and drafter and drafter.markov is not None:
            params = drafter.markov
        else:
            refiner: LoadedRefiner = context.need(self.name)
            params = refiner.params
        return MarkovRefiner(WeightedParams(Weight.of(self.alpha, self.slope), params))
