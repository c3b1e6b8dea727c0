"""Two methods whose drafts share one tree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from bpd_jax.drafting.interface import Drafter, Outcome, Prompts, View
from bpd_jax.drafting.merging import merge_prefixes, union
from bpd_jax.drafting.tree import DraftTree
from bpd_jax.typing import Array, Float, PyTree


@dataclasses.dataclass(frozen=True)
class UnionDrafter:
    """Checks the drafts of two methods in one serial call.

    What both draft is checked once. Drafts of `first` rank before those of `second`.
    Neither may draw its drafts at random, nor learn from the numbers of its nodes: what
    is accepted is reported in terms of the common tree.

    Attributes:
      first: a method on the device or on the host.
      second: a method on the device.
    """

    first: Drafter
    second: Drafter

    @property
    def on_device(self) -> bool:
        """Whether both are."""
        return self.first.on_device and self.second.on_device

    @property
    def max_depth(self) -> int:
        """Of the deeper one."""
        return max(self.first.max_depth, self.second.max_depth)

    @property
    def max_nodes(self) -> int:
        """Of both, with one root."""
        return self.first.max_nodes + self.second.max_nodes - 1

    @property
    def max_drafts(self) -> int:
        """Of both."""
        return self.first.max_drafts + self.second.max_drafts

    @property
    def arrays(self) -> tuple[PyTree, PyTree]:
        """Of both."""
        return self.first.arrays, self.second.arrays

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Those of `first`: drafters of the text's own past read no states."""
        assert not self.second.feature_layers
        return self.first.feature_layers

    def start(
        self, arrays: tuple[PyTree, PyTree], prompts: Prompts
    ) -> tuple[PyTree, PyTree]:
        """The memories of both."""
        return (
            self.first.start(arrays[0], prompts),
            self.second.start(arrays[1], prompts),
        )

    def look(
        self, view: View, arrays: tuple[PyTree, PyTree], memory: tuple[PyTree, PyTree]
    ) -> tuple[tuple[PyTree, PyTree], tuple[PyTree, PyTree]]:
        """Both look."""
        seen, remembered = self.first.look(view, arrays[0], memory[0])
        other, other_remembered = self.second.look(view, arrays[1], memory[1])
        return (seen, other), (remembered, other_remembered)

    def propose(
        self, seen: tuple[PyTree, PyTree], arrays: tuple[PyTree, PyTree] | None
    ) -> DraftTree:
        """Returns the common tree."""
        arrays = arrays or (None, None)
        return _joined(
            self.first.propose(seen[0], arrays[0]),
            self.second.propose(seen[1], arrays[1]),
            max_nodes=self.max_nodes,
            max_depth=self.max_depth,
        )

    def learn(
        self,
        arrays: tuple[PyTree, PyTree],
        memory: tuple[PyTree, PyTree],
        outcome: Outcome,
    ) -> tuple[PyTree, PyTree]:
        """Both learn."""
        return (
            self.first.learn(arrays[0], memory[0], outcome),
            self.second.learn(arrays[1], memory[1], outcome),
        )

    def entropies(self, seen: tuple[PyTree, PyTree]) -> Float[Array, "B L"] | None:
        """Of the first one's heads; NaN at positions that only the other reaches."""
        found = self.first.entropies(seen[0])
        if found is None:
            return None
        missing = self.max_depth - found.shape[1]
        return jnp.pad(found, ((0, 0), (0, missing)), constant_values=jnp.nan)


@functools.partial(jax.jit, static_argnames=("max_nodes", "max_depth"))
def _joined(
    first: DraftTree, second: DraftTree, *, max_nodes: int, max_depth: int
) -> DraftTree:
    # Compiled, because drafts from the host come here outside of all other code.
    return merge_prefixes(union(first, second), max_nodes, max_depth)
