"""A source, its refiners and a search, joined into a drafter."""

import dataclasses
from typing import Any

import flax.struct

from bpd_jax.drafting.interface import Outcome, Prompts, Search, View
from bpd_jax.drafting.paths import Paths
from bpd_jax.drafting.tree import DraftTree
from bpd_jax.typing import Array, Float, Int, PyTree


@flax.struct.dataclass
class Start:
    """Result of `look`: the first state of the paths."""

    state: Any
    first: Int[Array, " B"]
    keys: Array


@dataclasses.dataclass(frozen=True)
class PathDrafter:
    """Drafts that a search grows.

    Attributes:
      paths: which tokens may follow a path, and how likely they are.
      search: which paths are drafted.
    """

    paths: Paths
    search: Search
    on_device: bool = dataclasses.field(default=True, init=False)

    @property
    def max_depth(self) -> int:
        """L."""
        return self.paths.block_size

    @property
    def max_nodes(self) -> int:
        """Of the search."""
        return self.search.max_nodes(self.paths.block_size, self.paths.width)

    @property
    def max_drafts(self) -> int:
        """Of the search."""
        return self.search.max_drafts(self.paths.block_size, self.paths.width)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Of the source."""
        return self.paths.feature_layers

    @property
    def arrays(self) -> PyTree:
        """Of the source and the refiners."""
        return self.paths.arrays

    def start(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        """The memory of the source and the refiners."""
        return self.paths.remember(arrays, prompts)

    def look(self, view: View, arrays: PyTree, memory: PyTree) -> tuple[Start, PyTree]:
        """Starts the source and the refiners."""
        state, memory = self.paths.start(view, arrays, memory)
        return Start(state, view.next_token, view.keys), memory

    def propose(self, seen: Start, arrays: PyTree) -> DraftTree:
        """Returns the search's drafts."""
        return self.search.grow(self.paths, arrays, seen.state, seen.first, seen.keys)

    def learn(self, arrays: PyTree, memory: PyTree, outcome: Outcome) -> PyTree:
        """The memory after a serial call."""
        return self.paths.learn(arrays, memory, outcome)

    def entropies(self, seen: Start) -> Float[Array, "B L"] | None:
        """Of the heads, if the source has a lattice."""
        return self.paths.entropies(seen.state)
