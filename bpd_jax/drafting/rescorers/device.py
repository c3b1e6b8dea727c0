"""n-gram refinement inside the accelerator's loop, exact and without a host trip."""

import dataclasses
import functools

import jax
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.drafting.lattice import Drafts, Lattice, best_drafts
from bpd_jax.drafting.transitions.exact import best_paths
from bpd_jax.drafting.transitions.lattice_graph import Room
from bpd_jax.drafting.transitions.ngram import (
    NGramArrays,
    ngram_arrays,
    ngram_transitions,
)
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.typing import AnyArray, Array, Bool, Int


@dataclasses.dataclass(frozen=True)
class DeviceRescorer:
    """The P best distinct drafts under Σ log p_head + α · log p_ngram (section 7.2).

    Attributes:
      num_drafts: P, the paper's p.
      context_length: tokens of text before the block that matter, besides its first.
      arrays: the model.
      mesh: devices over which the model is cut, or None.
    """

    num_drafts: int
    context_length: int
    # Compiled code gets the arrays as an argument and serves every model and weight.
    arrays: NGramArrays = dataclasses.field(compare=False)
    mesh: Mesh | None = None
    on_device: bool = dataclasses.field(default=True, init=False)

    @classmethod
    def from_model(
        cls,
        model: NGramModel,
        num_drafts: int,
        alpha: float = 1.0,
        *,
        alpha_slope: float = 0.0,
        mesh: Mesh | None = None,
        axis: str = "data",
    ) -> "DeviceRescorer":
        """Puts a model on the device.

        Args:
          model: a back-off n-gram model over the same token ids; what it has no
            probability for gets log-probability -1000 (`with_finite_scores`).
          num_drafts: P.
          alpha: weight of the n-gram's log-probability.
          alpha_slope: how the weight grows with a head's entropy; see `Weight`.
          mesh: devices over which to cut the model; None keeps it whole on one.
          axis: the axis of the mesh.

        Raises:
          UserError: the model is too large, or alpha is negative.
        """
        arrays = ngram_arrays(model, alpha, alpha_slope, mesh, axis)
        return cls(num_drafts, max(model.order - 2, 0), arrays, mesh)

    def with_drafts(self, num_drafts: int) -> "DeviceRescorer":
        """Returns a rescorer of another P that shares the arrays."""
        return dataclasses.replace(self, num_drafts=num_drafts)

    def refine(
        self,
        lattice: Lattice,
        context: Int[AnyArray, "B C"],
        arrays: NGramArrays | None = None,
    ) -> Drafts:
        """The P best distinct drafts; the first token of a block is certain.

        Args:
          lattice: candidates of the block.
          context: the last C tokens of the text, -1 before its beginning.
          arrays: `self.arrays`, handed over by jitted code as an argument.
        """
        arrays = self.arrays if arrays is None else arrays
        if lattice.tokens.shape[1] == 1:  # Nothing but the certain token.
            return best_drafts(lattice, self.num_drafts)
        if arrays.table.shard_axis is None:
            return refine(arrays, lattice, context, self.num_drafts)
        cut = jax.tree.map(lambda _: PartitionSpec(arrays.table.shard_axis), arrays)
        whole = PartitionSpec()
        search = jax.shard_map(
            functools.partial(refine, num_drafts=self.num_drafts),
            mesh=self.mesh,
            in_specs=(dataclasses.replace(cut, alpha=whole), whole, whole),
            out_specs=whole,
            check_vma=False,
        )
        return search(arrays, lattice, context)


def refine(
    arrays: NGramArrays,
    lattice: Lattice,
    context: Int[AnyArray, "B C"],
    num_drafts: int,
    room: Room | None = None,
) -> Drafts:
    """Searches with room for what lattices usually need, else with room for all.

    The second search is compiled in too, and its working memory reserved: see `Room`.

    Args:
      arrays: the model.
      lattice: candidates.
      context: text before them.
      num_drafts: P.
      room: slots for longer n-grams; by default `Room.for_width`.
    """
    width = lattice.tokens.shape[-1]
    room, largest = room or Room.for_width(width), Room.largest(width)
    drafts, overflow = _search(arrays, lattice, context, num_drafts, room)

    def with_all_room(drafts: Drafts) -> Drafts:
        # Row by row, because of the slots that it takes.
        def search_row(row: tuple[Array, Drafts, Lattice, Array]) -> Drafts:
            missed, found, block, text = row

            def search(_: Drafts) -> Drafts:
                batch = jax.tree.map(lambda array: array[None], (block, text))
                again = _search(arrays, batch[0], batch[1], num_drafts, largest)[0]
                return jax.tree.map(lambda array: array[0], again)

            return jax.lax.cond(missed, search, lambda found: found, found)

        return jax.lax.map(search_row, (overflow, drafts, lattice, context))

    return jax.lax.cond(overflow.any(), with_all_room, lambda drafts: drafts, drafts)


def _search(
    arrays: NGramArrays,
    lattice: Lattice,
    context: Int[AnyArray, "B C"],
    num_drafts: int,
    room: Room,
) -> tuple[Drafts, Bool[Array, " B"]]:
    transitions, overflow = ngram_transitions(arrays, lattice, context, room)
    return best_paths(lattice, transitions, num_drafts), overflow
