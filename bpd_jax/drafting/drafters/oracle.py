"""The oracle: how far a perfect refinement of the lattice would reach."""

import dataclasses

import flax.struct
import jax.numpy as jnp

from bpd_jax.drafting.interface import Forgetful, View
from bpd_jax.drafting.lattice import Drafts
from bpd_jax.drafting.tree import DraftTree, from_drafts
from bpd_jax.typing import Array, Float, Int, PyTree


@flax.struct.dataclass
class Reference:
    """The plain greedy text, prompt included, which the oracle looks up."""

    tokens: Int[Array, "B S"]


@flax.struct.dataclass
class Glimpse:
    """The oracle's draft, and the entropies of the heads that it came from."""

    draft: Int[Array, "B L"]
    entropies: Float[Array, "B L"]


@dataclasses.dataclass(frozen=True)
class OracleDrafter(Forgetful):
    """Drafts the longest prefix of the true continuation that the lattice holds.

    An upper bound on every refinement of the same lattice (paper section 6.3). It is
    given a `Reference`.

    Attributes:
      block_size: L.
      width: W, candidates kept per head (the paper's k).
    """

    block_size: int
    width: int
    on_device: bool = dataclasses.field(default=True, init=False)
    max_drafts: int = dataclasses.field(default=1, init=False)

    @property
    def max_depth(self) -> int:
        """L."""
        return self.block_size

    @property
    def max_nodes(self) -> int:
        """L: one draft."""
        return self.block_size

    def start(
        self,
        arrays: None,
        tokens: Int[Array, "B S"],
        lengths: Int[Array, " B"],
        given: Reference,
    ) -> Reference:
        """Remembers the reference."""
        del arrays, tokens, lengths
        return given

    def look(
        self, view: View, arrays: None, memory: Reference
    ) -> tuple[Glimpse, Reference]:
        """Returns the true continuation where the lattice has it, else head's best."""
        del arrays
        lattice = view.model.lattice(
            view.hidden, view.next_token, self.block_size, self.width
        )
        places = view.lengths[:, None] + jnp.arange(self.block_size)
        true = jnp.take_along_axis(memory.tokens, places, axis=1, mode="clip")
        held = (lattice.tokens == true[:, :, None]).any(-1)
        draft = jnp.where(held, true, lattice.tokens[:, :, 0])
        return Glimpse(draft, lattice.entropies), memory

    def propose(self, seen: Glimpse, arrays: PyTree) -> DraftTree:
        """Returns one chain per row."""
        del arrays
        scores = jnp.zeros((seen.draft.shape[0], 1), jnp.float32)
        return from_drafts(Drafts(seen.draft[:, None], scores))

    def entropies(self, seen: Glimpse) -> Float[Array, "B L"]:
        """Of the heads."""
        return seen.entropies
