"""The oracle: how far a perfect refinement of the lattice would reach."""

import dataclasses

import flax.struct
import jax.numpy as jnp

from bpd_jax.drafting.interface import View
from bpd_jax.drafting.lattice import Drafts, build_lattice
from bpd_jax.drafting.tree import DraftTree, from_drafts
from bpd_jax.typing import Array, Int, PyTree


@flax.struct.dataclass
class Reference:
    """The plain greedy text, prompt included, which the oracle looks up."""

    tokens: Int[Array, "B S"]


@dataclasses.dataclass(frozen=True)
class OracleDrafter:
    """Drafts the longest prefix of the true continuation that the lattice holds.

    An upper bound on every refinement of the same lattice (paper section 6.3). Its
    draft state is a `Reference`.

    Attributes:
      block_size: L.
      width: W, candidates kept per head (the paper's k).
    """

    block_size: int
    width: int
    on_device: bool = dataclasses.field(default=True, init=False)

    @property
    def max_depth(self) -> int:
        """L."""
        return self.block_size

    def look(self, view: View, draft_state: PyTree) -> Int[Array, "B L"]:
        """Returns the true continuation where the lattice has it, else head's best."""
        reference: Reference = draft_state
        logits = view.head_logits(view.hidden)[:, : self.block_size]
        lattice = build_lattice(logits, view.next_token, self.width)
        places = view.lengths[:, None] + jnp.arange(self.block_size)
        true = jnp.take_along_axis(reference.tokens, places, axis=1, mode="clip")
        held = (lattice.tokens == true[:, :, None]).any(-1)
        return jnp.where(held, true, lattice.tokens[:, :, 0])

    def propose(self, seen: Int[Array, "B L"]) -> DraftTree:
        """Returns one chain per row."""
        scores = jnp.zeros((seen.shape[0], 1), jnp.float32)
        return from_drafts(Drafts(seen[:, None], scores))
