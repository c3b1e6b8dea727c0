"""No second opinion: the best paths under the heads' own scores ("0-gram")."""

import dataclasses

from bpd_jax.drafting.lattice import Drafts, Lattice, best_drafts
from bpd_jax.typing import AnyArray, Int


@dataclasses.dataclass(frozen=True)
class IndependentRescorer:
    """The P best drafts of independent heads; P = 1 is plain BPD.

    Attributes:
      num_drafts: P, the paper's p.
    """

    num_drafts: int = 1
    on_device: bool = dataclasses.field(default=True, init=False)
    context_length: int = dataclasses.field(default=0, init=False)
    arrays: None = dataclasses.field(default=None, init=False)

    def refine(
        self, lattice: Lattice, context: Int[AnyArray, "B C"], arrays: None = None
    ) -> Drafts:
        """Returns the P best paths; see `best_drafts`."""
        del context, arrays
        return best_drafts(lattice, self.num_drafts)
