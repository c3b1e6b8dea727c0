"""An n-gram model as a transition scorer, and the text's own bigrams."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.drafting.interface import View
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.transitions.adaptive import cache_counts, mixed
from bpd_jax.drafting.transitions.interface import Transitions, Weight
from bpd_jax.drafting.transitions.lattice_graph import Columns, Room, build_graph
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.search.device import DeviceTable
from bpd_jax.ngrams.search.finite import check_alpha, with_finite_scores
from bpd_jax.typing import AnyArray, Array, Bool, Float, Int


@flax.struct.dataclass
class NGramArrays:
    """What the search reads on the device: it is an argument of the jitted loop."""

    table: DeviceTable
    alpha: Weight


def ngram_arrays(
    model: NGramModel,
    alpha: float,
    alpha_slope: float = 0.0,
    mesh: Mesh | None = None,
    axis: str = "data",
) -> NGramArrays:
    """Puts a model on the device.

    Args:
      model: a back-off n-gram model over the same token ids; what it has no
        probability for gets log-probability -1000 (`with_finite_scores`).
      alpha: weight of the n-gram's log-probability.
      alpha_slope: how the weight grows with a head's entropy; see `Weight`.
      mesh: devices over which to cut the model; None keeps it whole on one.
      axis: the axis of the mesh.

    Raises:
      UserError: the model is too large, or alpha is negative.
    """
    check_alpha(alpha)
    table = DeviceTable.from_model(with_finite_scores(model))
    table = table.sharded(mesh, axis) if mesh else jax.device_put(table)
    return NGramArrays(table, Weight.of(alpha, alpha_slope))


def ngram_transitions(
    arrays: NGramArrays,
    lattice: Lattice,
    context: Int[AnyArray, "B C"],
    room: Room,
    cache: Float[Array, "B L-1 W W+1"] | None = None,
) -> tuple[Transitions, Bool[Array, " B"]]:
    """Scores all steps by an n-gram model.

    Args:
      arrays: the model.
      lattice: candidates.
      context: the last C tokens of the text before the block, -1 before its beginning.
      room: slots for longer n-grams.
      cache: how often the text has candidate w after candidate v; see `adaptive`.

    Returns:
      The transitions, and which rows lack n-grams because there was too little room.
    """
    columns = _columns(arrays.table, lattice, context)
    graph = build_graph(arrays.table, columns, room, every_candidate=cache is not None)
    # The last column of the text is the certain token.
    start = columns.predicted.shape[1] - lattice.tokens.shape[1]
    values, following = graph.values[:, start:], graph.following[:, start:]
    first = graph.states[:, start]
    if cache is not None:
        if arrays.table.order == 1:  # The one node there is does not tell candidates.
            shape = cache[..., :-1].shape
            values = jnp.broadcast_to(values, shape)
            following = jnp.broadcast_to(jnp.arange(shape[-1]), shape)
            seen = cache
        else:
            seen = jnp.take_along_axis(
                cache, graph.candidates[:, start:, :, None], axis=2
            )
        values = mixed(values, seen)
    alpha = arrays.alpha.at(lattice.entropies)[:, :, None, None]
    return Transitions(alpha * values, following, first), graph.overflow


@dataclasses.dataclass(frozen=True)
class NGramScorer:
    """α · log p_ngram, where p_ngram may be mixed with the text's own bigrams.

    Rows of a batch that need more room than `Room.for_width` gives lack some n-grams:
    they draft a little worse, and decode the same text.

    Attributes:
      arrays: the model.
      adaptive: whether to mix in the bigrams of the prompt and of the text so far.
    """

    # Compiled code gets the arrays as an argument and serves every model and weight.
    arrays: NGramArrays = dataclasses.field(compare=False)
    adaptive: bool = False

    def transitions(
        self, arrays: NGramArrays, lattice: Lattice, view: View
    ) -> Transitions:
        """Scores all steps; see `ngram_transitions`."""
        context = view.last_tokens(max(arrays.table.order - 2, 0))
        cache = None
        if self.adaptive:
            cache = cache_counts(lattice.tokens, view.tokens, view.lengths)
        room = Room.for_width(lattice.tokens.shape[-1])
        return ngram_transitions(arrays, lattice, context, room, cache)[0]


def _columns(
    table: DeviceTable, lattice: Lattice, context: Int[AnyArray, "B C"]
) -> Columns:
    """The text and the lattice as columns."""
    width = lattice.tokens.shape[-1]
    # The first column, certain, is the last one of the text.
    alone = jnp.arange(width) == 0
    text = jnp.where(alone, context[:, :, None], -1)
    certain = jnp.where(alone, lattice.tokens[:, :1], -1)
    tokens = jnp.concatenate([text, certain, lattice.tokens[:, 1:]], axis=1)
    return Columns(
        predicted=table.as_predicted(tokens),
        followed=table.as_history(tokens),
        valid=tokens >= 0,
    )
