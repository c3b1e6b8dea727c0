"""The oracle: an upper bound for refinement of a lattice."""

import dataclasses

import jax.numpy as jnp

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Float, PyTree
from bpd_jax.drafting.draft_tree import DraftTree, from_chain
from bpd_jax.drafting.interface import Drafter, Outcome, Prompts, Source, View
from bpd_jax.drafting.parts import BuildContext, RefinerPart, SearchPart, register
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.searches.beam_search import BeamSearch


@dataclasses.dataclass(frozen=True)
class OracleDrafter(PathDrafter):
    """Drafts the longest prefix of the reference text in the lattice.

    An upper bound for every refinement of the same lattice (paper section 6.3). The
    reference text is given as `Prompts.reference` and kept in the memory, in addition
    to that of the source.
    """

    def start(self, arrays: PyTree, prompts: Prompts) -> tuple[Array | None, PyTree]:
        """The reference and the memory of the source."""
        return prompts.reference, super().start(arrays, prompts)

    def learn(
        self, arrays: PyTree, memory: tuple[Array, PyTree], outcome: Outcome
    ) -> tuple[Array, PyTree]:
        """Updates the memory of the source."""
        return memory[0], super().learn(arrays, memory[1], outcome)

    def look(
        self, view: View, arrays: PyTree, memory: tuple[Array, PyTree]
    ) -> tuple[PyTree, PyTree]:
        """Reference tokens where the lattice has them, otherwise best candidates."""
        reference, source_memory = memory
        (state, *_), source_memory = super().look(view, arrays, source_memory)
        lattice = state.lattice
        assert lattice is not None
        positions = view.lengths[:, None] + jnp.arange(self.max_depth)
        right = jnp.take_along_axis(reference, positions, axis=1, mode="clip")
        in_lattice = (lattice.tokens == right[:, :, None]).any(-1)
        draft = jnp.where(in_lattice, right, lattice.tokens[:, :, 0])
        return (draft, lattice.entropies), (reference, source_memory)

    def propose(self, seen: PyTree, arrays: PyTree) -> DraftTree:
        """Returns one chain per row."""
        return from_chain(seen[0])

    def entropies(self, seen: PyTree) -> Float[Array, "B L"]:
        """Entropies of the heads."""
        return seen[1]


@register
@dataclasses.dataclass(frozen=True)
class Oracle(SearchPart):
    """The search `oracle`."""

    name = "oracle"
    title = "Oracle"
    help = "the best path of the lattice, an upper bound"
    reference = "Kim et al. 2024, section 6.3"
    is_oracle = True
    of_heads = ""

    def drafter(
        self, context: BuildContext, source: Source, refiners: tuple[RefinerPart, ...]
    ) -> Drafter:
        if refiners:
            raise UserError(
                f"{context.method}: the oracle uses the right tokens, so refiners "
                "change nothing: omit them."
            )
        # The draft has the sizes of a greedy walk.
        return OracleDrafter(Paths(source), BeamSearch(1))
