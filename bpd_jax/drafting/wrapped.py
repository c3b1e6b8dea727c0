"""The base of drafters that change some members of another one."""

import dataclasses

from bpd_jax.base.typing import Array, Float, PyTree
from bpd_jax.drafting.draft_tree import DraftTree
from bpd_jax.drafting.interface import Drafter


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
