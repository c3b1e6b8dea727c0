"""A path model and a search, joined to a drafting method."""

import dataclasses
from typing import Any, Protocol

import flax.struct

from bpd_jax.drafting.interface import Outcome, View
from bpd_jax.drafting.paths.interface import PathModel
from bpd_jax.drafting.tree import DraftTree
from bpd_jax.typing import Array, Float, Int, PyTree


class Search(Protocol):
    """Grows drafts from a path model; see `bpd_jax.drafting.searches`."""

    def max_nodes(self, block_size: int, width: int) -> int:
        """The most different prefixes of one tree."""
        ...

    def max_drafts(self, block_size: int, width: int) -> int:
        """The most leaves of one tree."""
        ...

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn, for speculative sampling."""
        ...

    def grow(
        self,
        model: PathModel,
        arrays: PyTree,
        state: PyTree,
        first: Int[Array, " B"],
        key: Array | None = None,
    ) -> DraftTree:
        """Returns the drafts.

        Args:
          model: of the paths.
          arrays: its arrays.
          state: its first state.
          first: the certain token.
          key: one random key per row, for a search that draws.
        """
        ...


@flax.struct.dataclass
class Start:
    """What `look` saw: the path model's first state."""

    state: Any
    first: Int[Array, " B"]
    keys: Array


@dataclasses.dataclass(frozen=True)
class PathDrafter:
    """Drafts that a search grows from a path model.

    Attributes:
      paths: what may follow a path, and how likely it is.
      search: which paths are drafted.
    """

    paths: PathModel
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
    def arrays(self) -> PyTree:
        """Those of the path model."""
        return self.paths.arrays

    def start(
        self,
        arrays: PyTree,
        tokens: Int[Array, "B S"],
        lengths: Int[Array, " B"],
        given: PyTree,
    ) -> PyTree:
        """The path model's memory."""
        del given
        return self.paths.remember(arrays, tokens, lengths)

    def look(self, view: View, arrays: PyTree, memory: PyTree) -> tuple[Start, PyTree]:
        """Starts the path model."""
        state, memory = self.paths.start(view, arrays, memory)
        return Start(state, view.next_token, view.keys), memory

    def propose(self, seen: Start, arrays: PyTree) -> DraftTree:
        """Returns the search's drafts."""
        return self.search.grow(self.paths, arrays, seen.state, seen.first, seen.keys)

    def learn(self, memory: PyTree, outcome: Outcome) -> PyTree:
        """Learns nothing: path models read the text."""
        del outcome
        return memory

    def entropies(self, seen: Start) -> Float[Array, "B L"] | None:
        """Of the heads, if the path model has heads."""
        return self.paths.entropies(seen.state)
