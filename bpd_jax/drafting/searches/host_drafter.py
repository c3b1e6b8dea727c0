"""Drafts from a lattice source that an engine on the host refines."""

import dataclasses

import flax.struct

from bpd_jax.drafting.engines.host import HostEngine
from bpd_jax.drafting.interface import Outcome, Prompts, Source, View
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.searches.chains import most_paths, most_prefixes
from bpd_jax.drafting.tree import DraftTree, from_drafts
from bpd_jax.typing import Array, Float, Int, PyTree


@flax.struct.dataclass
class HostBlock:
    """What an engine reads: the candidates of a block and the text just before it."""

    lattice: Lattice
    context: Int[Array, "B C"]


@dataclasses.dataclass(frozen=True)
class SourceDrafter:
    """Base of drafters that read one lattice source and no refiners on the device.

    Attributes:
      source: of the lattice.
    """

    source: Source

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Of the source."""
        return self.source.feature_layers

    @property
    def arrays(self) -> PyTree:
        """Of the source."""
        return self.source.arrays

    @property
    def max_depth(self) -> int:
        """L."""
        return self.source.block_size


@dataclasses.dataclass(frozen=True)
class HostDrafter(SourceDrafter):
    """The lattice is built on the device and searched on the host.

    Attributes:
      num_drafts: P.
      context_length: tokens of text before the block that the engine reads.
      engine: searches.
    """

    num_drafts: int
    context_length: int
    engine: HostEngine = dataclasses.field(compare=False)
    on_device: bool = dataclasses.field(default=False, init=False)

    @property
    def max_nodes(self) -> int:
        """Different prefixes of P drafts."""
        return most_prefixes(self.max_depth, self.source.width, self.num_drafts)

    @property
    def max_drafts(self) -> int:
        """P, or all paths if they are fewer."""
        return most_paths(self.max_depth, self.source.width, self.num_drafts)

    def start(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        """The source's memory."""
        return self.source.remember(arrays, prompts)

    def look(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[HostBlock, PyTree]:
        """Returns the lattice and the text just before the block."""
        state, memory = self.source.start(view, arrays, memory)
        lattice = self.source.lattice(state)
        assert lattice is not None
        return HostBlock(lattice, view.last_tokens(self.context_length)), memory

    def propose(self, seen: HostBlock, arrays: PyTree) -> DraftTree:
        """Returns the engine's drafts as chains."""
        del arrays
        drafts = self.engine.refine(seen.lattice, seen.context, self.num_drafts)
        return from_drafts(drafts)

    def learn(self, arrays: PyTree, memory: PyTree, outcome: Outcome) -> PyTree:
        """The source's memory after a serial call."""
        return self.source.learn(arrays, memory, outcome)

    def entropies(self, seen: HostBlock) -> Float[Array, "B L"]:
        """Of the heads."""
        return seen.lattice.entropies
