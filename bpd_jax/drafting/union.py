"""Drafters made of another one: the base of them, and one that adds prompt lookup."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, PyTree
from bpd_jax.drafting.draft_tree import DraftTree, merge_prefixes, union
from bpd_jax.drafting.interface import Drafter, Outcome, Prompts, View


@dataclasses.dataclass(frozen=True)
class WrappedDrafter(Drafter):
    """Drafts as `inner` does, with the memory of a subclass."""

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
class WithLookup(WrappedDrafter):
    """Verifies the drafts of `inner` and a copy from the text in one serial call.

    Common prefixes are verified once; the drafts of `inner` rank first. It may neither
    sample drafts nor use node indices in `learn`, because the outcome refers to the
    merged tree.

    Attributes:
      lookup: a drafter on the device without memory, arrays and feature layers.
    """

    lookup: Drafter

    @property
    def max_depth(self) -> int:
        """The larger depth."""
        return max(self.inner.max_depth, self.lookup.max_depth)

    @property
    def max_nodes(self) -> int:
        """The sum, with a single root."""
        return self.inner.max_nodes + self.lookup.max_nodes - 1

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """Those of `inner`, because there may be no copy, and the sum."""
        return (*self.inner.pass_sizes, self.max_nodes)

    @property
    def max_drafts(self) -> int:
        """The sum."""
        return self.inner.max_drafts + self.lookup.max_drafts

    def start(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        return self.inner.start(arrays, prompts)

    def look(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[tuple[PyTree, PyTree], PyTree]:
        """Calls `look` of both."""
        seen, memory = self.inner.look(view, arrays, memory)
        return (seen, self.lookup.look(view, None, None)[0]), memory

    def propose(self, seen: tuple[PyTree, PyTree], arrays: PyTree) -> DraftTree:
        """Returns the merged tree."""
        drafts = self.inner.propose(seen[0], arrays)
        copied = self.lookup.propose(seen[1], None)
        return _merged(drafts, copied, self.max_nodes, self.max_depth)

    def learn(self, arrays: PyTree, memory: PyTree, outcome: Outcome) -> PyTree:
        return self.inner.learn(arrays, memory, outcome)

    def entropies(self, seen: tuple[PyTree, PyTree]) -> Float[Array, "B L"] | None:
        """Entropies of `inner`, padded with NaN to the common depth."""
        entropies = self.inner.entropies(seen[0])
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
