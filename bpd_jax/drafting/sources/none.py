"""Methods without drafts: plain decoding, and `auto` until it is chosen."""

import dataclasses

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Int, PyTree
from bpd_jax.drafting.draft_tree import DraftTree, from_chain
from bpd_jax.drafting.interface import Drafter, View
from bpd_jax.drafting.parts import BuildContext, StandalonePart, register


@dataclasses.dataclass(frozen=True)
class PlainDrafter(Drafter):
    """Plain decoding: the reference that every other method must reproduce."""

    def look(
        self, view: View, arrays: None, memory: None
    ) -> tuple[Int[Array, " B"], None]:
        """Returns the certain token."""
        return view.next_token, memory

    def propose(self, seen: Int[Array, " B"], arrays: PyTree) -> DraftTree:
        """Returns a tree of one node per row."""
        return from_chain(seen[:, None])


@register
@dataclasses.dataclass(frozen=True)
class NoSource(StandalonePart):
    """The source `none`: plain decoding."""

    name = "none"
    title = "Greedy"
    help = "no draft: one token per serial call"
    reference = "plain decoding"

    def build(self, context: BuildContext) -> PlainDrafter:
        return PlainDrafter()


@register
@dataclasses.dataclass(frozen=True)
class Auto(StandalonePart):
    """The source `auto`, which stands for another method until it is chosen."""

    name = "auto"
    title = "Automatic"
    help = "the fastest method on this device, by measurement"

    def build(self, context: BuildContext) -> Drafter:
        """Refuses to draft: it has to be replaced by its choice."""
        raise UserError(
            "auto is not a method by itself: name a method, or let decode or generate "
            "measure which method is fastest (choose_method)."
        )
