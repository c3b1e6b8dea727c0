"""Drafters made of others: the base of those that change one, and the union of two."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, PyTree
from bpd_jax.drafting.draft_tree import DraftTree, merge_prefixes, union
from bpd_jax.drafting.interface import Drafter, Outcome, Prompts, View


@dataclasses.dataclass(frozen=True)
class WrappedDrafter:
    """Drafts as `inner` does; subclasses have a memory of their own. See `Drafter`."""

    inner: Drafter

    @property
    def on_device(self) -> bool:
        """That of `inner`, as all that follows."""
        return self.inner.on_device

    @property
    def max_depth(self) -> int:
        return self.inner.max_depth

    @property
    def max_nodes(self) -> int:
        return self.inner.max_nodes

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        return self.inner.pass_sizes

    @property
    def max_drafts(self) -> int:
        return self.inner.max_drafts

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.inner.feature_layers

    @property
    def arrays(self) -> PyTree:
        return self.inner.arrays

    def propose(self, seen: PyTree, arrays: PyTree) -> DraftTree:
        return self.inner.propose(seen, arrays)

    def entropies(self, seen: PyTree) -> Float[Array, "B L"] | None:
        return self.inner.entropies(seen)


@dataclasses.dataclass(frozen=True)
class UnionDrafter:
    """Verifies the drafts of two methods in one serial call.

    Common prefixes are verified once. Drafts of `first` rank before those of `second`.
    Neither method may sample drafts or use node indices in `learn`, because the outcome
    refers to the merged tree.

    Attributes:
      first: a method on the device or on the host.
      second: a method on the device.
    """

    first: Drafter
    second: Drafter

    @property
    def on_device(self) -> bool:
        """Whether both run on the device."""
        return self.first.on_device and self.second.on_device

    @property
    def max_depth(self) -> int:
        """The larger depth."""
        return max(self.first.max_depth, self.second.max_depth)

    @property
    def max_nodes(self) -> int:
        """The sum, with a single root."""
        return self.first.max_nodes + self.second.max_nodes - 1

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """Those of `first`, because the second tree may be empty, and the sum."""
        return (*self.first.pass_sizes, self.max_nodes)

    @property
    def max_drafts(self) -> int:
        """The sum."""
        return self.first.max_drafts + self.second.max_drafts

    @property
    def arrays(self) -> tuple[PyTree, PyTree]:
        """The arrays of both."""
        return self.first.arrays, self.second.arrays

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers of `first`; prompt lookup reads none."""
        assert not self.second.feature_layers
        return self.first.feature_layers

    def start(
        self, arrays: tuple[PyTree, PyTree], prompts: Prompts
    ) -> tuple[PyTree, PyTree]:
        """The memories of both."""
        first = self.first.start(arrays[0], prompts)
        return first, self.second.start(arrays[1], prompts)

    def look(
        self, view: View, arrays: tuple[PyTree, PyTree], memory: tuple[PyTree, PyTree]
    ) -> tuple[tuple[PyTree, PyTree], tuple[PyTree, PyTree]]:
        """Calls `look` of both."""
        first, first_memory = self.first.look(view, arrays[0], memory[0])
        second, second_memory = self.second.look(view, arrays[1], memory[1])
        return (first, second), (first_memory, second_memory)

    def propose(
        self, seen: tuple[PyTree, PyTree], arrays: tuple[PyTree, PyTree] | None
    ) -> DraftTree:
        """Returns the merged tree."""
        arrays = arrays or (None, None)
        first = self.first.propose(seen[0], arrays[0])
        second = self.second.propose(seen[1], arrays[1])
        return _merged(first, second, self.max_nodes, self.max_depth)

    def learn(
        self,
        arrays: tuple[PyTree, PyTree],
        memory: tuple[PyTree, PyTree],
        outcome: Outcome,
    ) -> tuple[PyTree, PyTree]:
        """Calls `learn` of both."""
        first = self.first.learn(arrays[0], memory[0], outcome)
        return first, self.second.learn(arrays[1], memory[1], outcome)

    def entropies(self, seen: tuple[PyTree, PyTree]) -> Float[Array, "B L"] | None:
        """Entropies of `first`, padded with NaN to the common depth."""
        entropies = self.first.entropies(seen[0])
        if entropies is None:
            return None
        missing = self.max_depth - entropies.shape[1]
        return jnp.pad(entropies, ((0, 0), (0, missing)), constant_values=jnp.nan)


@functools.partial(jax.jit, static_argnames=("max_nodes", "max_depth"))
def _merged(
    first: DraftTree, second: DraftTree, max_nodes: int, max_depth: int
) -> DraftTree:
    # Jitted here, because drafts from the host are merged outside other jitted code.
    return merge_prefixes(union(first, second), max_nodes, max_depth)
