"""Blockwise parallel drafts: the heads' lattice, refined by a rescorer."""

import dataclasses

import jax.numpy as jnp

from bpd_jax.drafting.interface import Rescorer, View
from bpd_jax.drafting.lattice import Lattice, build_lattice
from bpd_jax.drafting.tree import DraftTree, from_drafts
from bpd_jax.typing import Array, Int, PyTree


@dataclasses.dataclass(frozen=True)
class BlockwiseDrafter:
    """Drafts from L heads (Stern et al. 2018; Kim et al. 2024, section 7).

    Attributes:
      rescorer: turns the lattice into P drafts.
      block_size: L, the number of heads used.
      width: W, candidates kept per head (the paper's k).
    """

    rescorer: Rescorer
    block_size: int
    width: int

    @property
    def on_device(self) -> bool:
        """Where the rescorer runs."""
        return self.rescorer.on_device

    @property
    def max_depth(self) -> int:
        """L."""
        return self.block_size

    def look(
        self, view: View, draft_state: PyTree
    ) -> tuple[Lattice, Int[Array, "B C"], PyTree]:
        """Returns the lattice, the text just before the block and the draft state.

        The draft state is the rescorer's `arrays`.
        """
        logits = view.head_logits(view.hidden)[:, : self.block_size]
        lattice = build_lattice(logits, view.next_token, self.width)
        return lattice, last_tokens(view, self.rescorer.context_length), draft_state

    def propose(self, seen: tuple[Lattice, Int[Array, "B C"], PyTree]) -> DraftTree:
        """Returns the rescorer's drafts as chains."""
        return from_drafts(self.rescorer.refine(*seen))


def last_tokens(view: View, count: int) -> Int[Array, "B C"]:
    """The last `count` tokens of every row's text, -1 before its beginning."""
    places = view.lengths[:, None] - jnp.arange(count, 0, -1)
    found = jnp.take_along_axis(view.tokens, jnp.maximum(places, 0), axis=1)
    return jnp.where(places < 0, -1, found)
