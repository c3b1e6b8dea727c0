"""Blockwise parallel drafts: the heads' lattice, refined by a rescorer."""

import dataclasses

import flax.struct

from bpd_jax.drafting.interface import Forgetful, Rescorer, View
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.searches.chains import most_paths, most_prefixes
from bpd_jax.drafting.tree import DraftTree, from_drafts
from bpd_jax.typing import Array, Float, Int, PyTree


@flax.struct.dataclass
class Block:
    """What a rescorer sees of a block: its candidates and the text just before it."""

    lattice: Lattice
    context: Int[Array, "B C"]


@dataclasses.dataclass(frozen=True)
class BlockwiseDrafter(Forgetful):
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
    def arrays(self) -> PyTree:
        """Those of the rescorer."""
        return self.rescorer.arrays

    @property
    def max_depth(self) -> int:
        """L."""
        return self.block_size

    @property
    def max_nodes(self) -> int:
        """Different prefixes of P drafts."""
        return most_prefixes(self.block_size, self.width, self.rescorer.num_drafts)

    @property
    def max_drafts(self) -> int:
        """P, or all paths if they are fewer."""
        return most_paths(self.block_size, self.width, self.rescorer.num_drafts)

    def look(self, view: View, arrays: PyTree, memory: None) -> tuple[Block, None]:
        """Returns the lattice and the text just before the block."""
        del arrays
        lattice = view.model.lattice(
            view.hidden, view.next_token, self.block_size, self.width
        )
        return Block(lattice, view.last_tokens(self.rescorer.context_length)), memory

    def propose(self, seen: Block, arrays: PyTree) -> DraftTree:
        """Returns the rescorer's drafts as chains."""
        return from_drafts(self.rescorer.refine(seen.lattice, seen.context, arrays))

    def entropies(self, seen: Block) -> Float[Array, "B L"]:
        """Of the heads."""
        return seen.lattice.entropies
