"""The oracle: how far a perfect refinement of the lattice would reach."""

import dataclasses
from typing import ClassVar

import flax.struct
import jax.numpy as jnp

from bpd_jax.drafting.interface import Drafter, Outcome, Prompts, Source, View
from bpd_jax.drafting.lattice import Drafts
from bpd_jax.drafting.parts import (
    BuildContext,
    RefinerPart,
    SearchPart,
    register,
)
from bpd_jax.drafting.searches.host_drafter import SourceDrafter
from bpd_jax.drafting.tree import DraftTree, from_drafts
from bpd_jax.errors import UserError
from bpd_jax.typing import Array, Float, Int, PyTree


@flax.struct.dataclass
class Reference:
    """The plain greedy text, prompt included, which the oracle looks up."""

    tokens: Int[Array, "B S"]


@flax.struct.dataclass
class Glimpse:
    """The oracle's draft, and the entropies of the heads that it came from."""

    draft: Int[Array, "B L"]
    entropies: Float[Array, "B L"]


@dataclasses.dataclass(frozen=True)
class OracleDrafter(SourceDrafter):
    """Drafts the longest prefix of the true continuation that the lattice holds.

    An upper bound on every refinement of the same lattice (paper section 6.3). It is
    given a `Reference`.
    """

    on_device: bool = dataclasses.field(default=True, init=False)
    max_drafts: int = dataclasses.field(default=1, init=False)

    @property
    def max_nodes(self) -> int:
        """L: one draft."""
        return self.source.block_size

    def start(self, arrays: PyTree, prompts: Prompts) -> tuple[Reference, PyTree]:
        """The reference and the source's memory."""
        return prompts.given, self.source.remember(arrays, prompts)

    def learn(
        self, arrays: PyTree, memory: tuple[Reference, PyTree], outcome: Outcome
    ) -> tuple[Reference, PyTree]:
        """The source's memory after a serial call."""
        return memory[0], self.source.learn(arrays, memory[1], outcome)

    def look(
        self, view: View, arrays: PyTree, memory: tuple[Reference, PyTree]
    ) -> tuple[Glimpse, tuple[Reference, PyTree]]:
        """The true continuation where the lattice has it, else the best candidate."""
        reference, kept = memory
        state, kept = self.source.start(view, arrays, kept)
        lattice = self.source.lattice(state)
        assert lattice is not None
        positions = view.lengths[:, None] + jnp.arange(self.source.block_size)
        true = jnp.take_along_axis(reference.tokens, positions, axis=1, mode="clip")
        held = (lattice.tokens == true[:, :, None]).any(-1)
        draft = jnp.where(held, true, lattice.tokens[:, :, 0])
        return Glimpse(draft, lattice.entropies), (reference, kept)

    def propose(self, seen: Glimpse, arrays: PyTree) -> DraftTree:
        """Returns one chain per row."""
        del arrays
        scores = jnp.zeros((seen.draft.shape[0], 1), jnp.float32)
        return from_drafts(Drafts(seen.draft[:, None], scores))

    def entropies(self, seen: Glimpse) -> Float[Array, "B L"]:
        """Of the heads."""
        return seen.entropies


@register
@dataclasses.dataclass(frozen=True)
class Oracle(SearchPart):
    """The search `oracle`."""

    name: ClassVar[str] = "oracle"
    help: ClassVar[str] = "the best that the lattice holds: an upper bound"
    reference: ClassVar[str] = "Kim et al. 2024, section 6.3"

    def drafter(
        self, context: BuildContext, source: Source, refiners: tuple[RefinerPart, ...]
    ) -> Drafter:
        """Makes the drafter.

        Raises:
          UserError: there are refiners, which do not change the bound.
        """
        if refiners:
            raise UserError(
                f"{context.method}: the oracle knows the right tokens, so refiners "
                "change nothing: leave them out."
            )
        return OracleDrafter(source)

    def label(self, order: int | None = None) -> str:
        """What people read in tables."""
        del order
        return "Oracle"
