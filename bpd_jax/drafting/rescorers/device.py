"""n-gram refinement inside the accelerator's loop, exact and without a host trip."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.drafting.lattice import Drafts, Lattice, best_drafts
from bpd_jax.drafting.rescorers.lattice_graph import Columns, Graph, Room, build_graph
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.search.device import DeviceTable
from bpd_jax.ngrams.search.finite import check_alpha, with_finite_scores
from bpd_jax.typing import AnyArray, Array, Bool, Float, Int


@flax.struct.dataclass
class NGramArrays:
    """What the search reads on the device: it is an argument of the jitted loop."""

    table: DeviceTable
    alpha: Float[Array, ""]


@dataclasses.dataclass(frozen=True, eq=False)
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
    arrays: NGramArrays
    mesh: Mesh | None = None
    on_device: bool = dataclasses.field(default=True, init=False)

    @classmethod
    def from_model(
        cls,
        model: NGramModel,
        num_drafts: int,
        alpha: float = 1.0,
        *,
        mesh: Mesh | None = None,
        axis: str = "data",
    ) -> "DeviceRescorer":
        """Puts a model on the device.

        Args:
          model: a back-off n-gram model over the same token ids; what it has no
            probability for gets log-probability -1000 (`with_finite_scores`).
          num_drafts: P.
          alpha: weight of the n-gram's log-probability.
          mesh: devices over which to cut the model; None keeps it whole on one.
          axis: the axis of the mesh.

        Raises:
          UserError: the model is too large, or alpha is negative.
        """
        check_alpha(alpha)
        table = DeviceTable.from_model(with_finite_scores(model))
        table = table.sharded(mesh, axis) if mesh else jax.device_put(table)
        arrays = NGramArrays(table, jnp.float32(alpha))
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
    table, alpha = arrays.table, arrays.alpha
    columns, scores = _columns(table, lattice, context)
    graph = build_graph(table, columns, room)
    start = columns.predicted.shape[1] - lattice.tokens.shape[1]
    return _best_drafts(
        graph, lattice, scores, alpha, start, num_drafts
    ), graph.overflow


def _columns(
    table: DeviceTable, lattice: Lattice, context: Int[AnyArray, "B C"]
) -> tuple[Columns, Float[Array, "B L W"]]:
    """The text and the lattice as columns, and the scores of the lattice's."""
    width = lattice.tokens.shape[-1]
    # The first column, certain, is the last one of the text.
    alone = jnp.arange(width) == 0
    text = jnp.where(alone, context[:, :, None], -1)
    certain = jnp.where(alone, lattice.tokens[:, :1], -1)
    tokens = jnp.concatenate([text, certain, lattice.tokens[:, 1:]], axis=1)

    # Of a token that a position has twice, the better one counts.
    better = lattice.log_probs[..., None, :] > lattice.log_probs[..., None]
    same = lattice.tokens[..., None, :] == lattice.tokens[..., None]
    equal = lattice.log_probs[..., None, :] == lattice.log_probs[..., None]
    earlier = jnp.arange(width) < jnp.arange(width)[:, None]
    repeated = (same & (better | (equal & earlier))).any(axis=-1)
    scores = jnp.where(repeated, -jnp.inf, lattice.log_probs)
    columns = Columns(
        predicted=table.as_predicted(tokens),
        followed=table.as_history(tokens),
        valid=tokens >= 0,
    )
    return columns, scores


def _best_drafts(
    graph: Graph,
    lattice: Lattice,
    scores: Float[Array, "B L W"],
    alpha: Float[Array, ""],
    start: int,
    num_drafts: int,
) -> Drafts:
    """The P best paths through the graph.

    Backwards, the best completion of every node; then forwards: with exact completions
    the P best prefixes of every length contain those of the P best paths.

    Args:
      graph: of the text and the lattice.
      lattice: the candidates.
      scores: of the candidates.
      alpha: weight of the n-gram's log-probability.
      start: the position of the certain token among the columns.
      num_drafts: P.
    """
    batch, _, width = lattice.tokens.shape
    # Steps first, for the scans: `steps[j]` leads to position j + 1 of the block.
    values = jnp.moveaxis(graph.values[:, start:], 1, 0)
    following = jnp.moveaxis(graph.following[:, start:], 1, 0)
    steps = jnp.moveaxis(scores[:, 1:], 1, 0)[:, :, None] + alpha * values
    nodes = values.shape[2]

    def complete(
        best: Float[Array, "B M"], step: tuple[Array, Array]
    ) -> tuple[Float[Array, "B M"], Float[Array, "B M W"]]:
        gain, target = step
        after = jax.vmap(lambda row, index: row[index])(best, target)
        total = gain + after
        return total.max(axis=-1), total

    _, totals = jax.lax.scan(
        complete, jnp.zeros((batch, nodes)), (steps, following), reverse=True
    )

    def extend(
        paths: tuple[Array, Array], step: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        node, gain = paths
        total, gains, target = (
            jax.vmap(lambda row, index: row[index])(array, node) for array in step
        )
        promise = (gain[:, :, None] + total).reshape(batch, -1)
        promise, chosen = jax.lax.top_k(promise, num_drafts)
        parent, candidate = chosen // width, chosen % width
        gain = jnp.take_along_axis(
            (gain[:, :, None] + gains).reshape(batch, -1), chosen, axis=1
        )
        gain = jnp.where(jnp.isneginf(promise), -jnp.inf, gain)
        node = jnp.take_along_axis(target.reshape(batch, -1), chosen, axis=1)
        return (node, gain), (parent, candidate)

    rank = jnp.arange(num_drafts)
    node = jnp.broadcast_to(graph.states[:, start, None], (batch, num_drafts))
    gain = jnp.broadcast_to(jnp.where(rank == 0, 0.0, -jnp.inf), (batch, num_drafts))
    (_, gain), (parents, picks) = jax.lax.scan(
        extend, (node, gain), (totals, steps, following)
    )

    def trace(
        at: Int[Array, "B P"], step: tuple[Array, Array, Array]
    ) -> tuple[Int[Array, "B P"], Int[Array, "B P"]]:
        parent, pick, tokens = step
        chosen = jnp.take_along_axis(pick, at, axis=1)
        token = jnp.take_along_axis(tokens, chosen, axis=1)
        return jnp.take_along_axis(parent, at, axis=1), token

    columns = jnp.moveaxis(lattice.tokens[:, 1:], 1, 0)
    first = jnp.broadcast_to(rank, (batch, num_drafts))
    _, tokens = jax.lax.scan(trace, first, (parents, picks, columns), reverse=True)
    certain = jnp.broadcast_to(lattice.tokens[:, 0, :1], (batch, num_drafts))
    return Drafts(
        tokens=jnp.concatenate([certain[:, :, None], jnp.moveaxis(tokens, 0, 2)], 2),
        scores=gain,
    )
