"""A trained low-rank bigram as a transition scorer (the Markov head of DSpark)."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.drafting.interface import View
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.transitions.interface import (
    Transitions,
    Weight,
    between_candidates,
)
from bpd_jax.models.refiners import markov_scores
from bpd_jax.typing import Params


@flax.struct.dataclass
class MarkovArrays:
    """What the scorer reads on the device."""

    alpha: Weight
    params: Params


@dataclasses.dataclass(frozen=True)
class MarkovScorer:
    """α times the corrections of the heads' logits; sees one candidate back.

    Attributes:
      arrays: weight and parameters.
    """

    arrays: MarkovArrays = dataclasses.field(compare=False)

    def transitions(
        self, arrays: MarkovArrays, lattice: Lattice, view: View
    ) -> Transitions:
        """Scores all W × W pairs of candidates at each position."""
        del view
        tokens = lattice.tokens
        levels = jnp.arange(1, tokens.shape[1])
        score = jax.vmap(markov_scores, in_axes=(None, 1, 1, 0), out_axes=1)
        scores = score(arrays.params, tokens[:, :-1], tokens[:, 1:, None], levels)
        alpha = arrays.alpha.at(lattice.entropies)[:, :, None, None]
        return between_candidates(alpha * scores)
