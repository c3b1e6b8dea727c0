"""Greedy walks and beams: the paths as chains."""

import dataclasses

import jax.numpy as jnp

from bpd_jax.drafting.lattice import Drafts
from bpd_jax.drafting.paths.interface import PathModel
from bpd_jax.drafting.searches.chains import Chains
from bpd_jax.drafting.searches.growth import grow_best
from bpd_jax.drafting.tree import DraftTree, from_drafts, take
from bpd_jax.typing import Array, Int, PyTree


@dataclasses.dataclass(frozen=True)
class Beam(Chains):
    """The P best paths that a beam of P finds; P = 1 walks greedily.

    Attributes:
      normalise: whether candidates are normalised after every path, so that a score is
        a probability: right for refiners that were trained so.
    """

    normalise: bool = False

    def grow(
        self,
        model: PathModel,
        arrays: PyTree,
        state: PyTree,
        first: Int[Array, " B"],
        key: Array | None = None,
    ) -> DraftTree:
        """Returns the paths as chains, best first."""
        del key
        count = self.max_drafts(model.block_size, model.width)
        levels = grow_best(model, arrays, state, first, count, normalise=self.normalise)
        at = jnp.broadcast_to(jnp.arange(count), (first.shape[0], count))
        tokens = []
        for level in reversed(levels):
            tokens.append(take(level.tokens, at))
            at = take(level.parents, at)
        drafts = Drafts(jnp.stack(tokens[::-1], axis=-1), levels[-1].scores)
        return from_drafts(drafts)
