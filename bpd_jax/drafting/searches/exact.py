"""The exact p-best search, for path models with finitely many nodes."""

import dataclasses

from bpd_jax.drafting.paths.interface import PathModel
from bpd_jax.drafting.paths.lattice import LatticePaths
from bpd_jax.drafting.searches.beam import most_paths, most_prefixes
from bpd_jax.drafting.tree import DraftTree, from_drafts
from bpd_jax.typing import Array, Int, PyTree


@dataclasses.dataclass(frozen=True)
class ExactBest:
    """The P best of all paths of a lattice (paper section 7.2).

    Attributes:
      num_drafts: P, the paper's p.
    """

    num_drafts: int = 1

    def max_nodes(self, block_size: int, width: int) -> int:
        """Different prefixes of P paths."""
        return most_prefixes(block_size, width, self.num_drafts)

    def max_drafts(self, block_size: int, width: int) -> int:
        """P, or all paths if they are fewer."""
        return most_paths(block_size, width, self.num_drafts)

    @property
    def draws(self) -> bool:
        """Never."""
        return False

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
