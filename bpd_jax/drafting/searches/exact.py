"""The exact p-best search, for path models with finitely many nodes."""

import dataclasses

from bpd_jax.drafting.paths.interface import PathModel
from bpd_jax.drafting.paths.lattice import LatticePaths
from bpd_jax.drafting.searches.chains import Chains
from bpd_jax.drafting.tree import DraftTree, from_drafts
from bpd_jax.typing import Array, Int, PyTree


@dataclasses.dataclass(frozen=True)
class ExactBest(Chains):
    """The P best of all paths of a lattice (paper section 7.2)."""

    def grow(
        self,
        model: PathModel,
        arrays: PyTree,
        state: PyTree,
        first: Int[Array, " B"],
        key: Array | None = None,
    ) -> DraftTree:
        """Returns the paths as chains, best first."""
        del arrays, first, key
        assert isinstance(model, LatticePaths)
        count = self.max_drafts(model.block_size, model.width)
        return from_drafts(model.best(state, count))
