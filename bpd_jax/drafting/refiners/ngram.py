"""An n-gram model as a refiner, with the text's own bigrams on request."""

import dataclasses
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.drafting.interface import Prompts, Source, View
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.parts import BuildContext, RefinerPart, register
from bpd_jax.drafting.refiners.adaptive import cache_counts, mixed
from bpd_jax.drafting.refiners.lattice_graph import Columns, Room, build_graph
from bpd_jax.drafting.refiners.transitions import Transitions, Weight
from bpd_jax.drafting.refiners.weights import DEFAULT_ALPHA, SLOPE
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.search.device_table import DeviceTable
from bpd_jax.ngrams.search.finite_scores import check_alpha, with_finite_scores
from bpd_jax.settings import SWITCH, setting
from bpd_jax.typing import AnyArray, Array, Float, Int


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
    table = device_table(model, mesh, axis)
    return NGramArrays(table, Weight.of(alpha, alpha_slope))


def device_table(
    model: NGramModel, mesh: Mesh | None = None, axis: str = "data"
) -> DeviceTable:
    """The table of a model on the device, or cut over the devices of a mesh."""
    table = DeviceTable.from_model(with_finite_scores(model))
    return table.sharded(mesh, axis) if mesh else jax.device_put(table)


@flax.struct.dataclass
class NGramInputs:
    """What the refiner needs besides the lattice.

    Attributes:
      context: the last C tokens of the text before the block, -1 before its beginning.
      cache: how often the text has candidate w after candidate v (see `adaptive`), or
        None.
    """

    context: Int[AnyArray, "B C"]
    cache: Float[Array, "B L-1 W W+1"] | None = None


@dataclasses.dataclass(frozen=True)
class NGramRefiner:
    """α · log p_ngram, where p_ngram may be mixed with the text's own bigrams.

    Rows of a batch that need more room than `Room.for_width` gives lack some n-grams.
    The exact search repeats them with all the room that they need; in other searches
    their drafts are a little worse.

    Attributes:
      arrays: the model and its weight.
      context_length: tokens of text before the block that matter, besides its first.
      adaptive: whether to mix in the bigrams of the prompt and of the text so far.
      room: slots for longer n-grams; None for those of `Room.for_width`.
    """

    arrays: NGramArrays = dataclasses.field(compare=False)
    context_length: int
    adaptive: bool = False
    room: Room | None = None

    @classmethod
    def from_model(
        cls,
        model: NGramModel,
        alpha: float = 1.0,
        *,
        slope: float = 0.0,
        adaptive: bool = False,
        mesh: Mesh | None = None,
        axis: str = "data",
    ) -> "NGramRefiner":
        """Puts a model on the device; see `ngram_arrays`."""
        arrays = ngram_arrays(model, alpha, slope, mesh, axis)
        return cls(arrays, max(model.order - 2, 0), adaptive)

    def remember(self, arrays: NGramArrays, prompts: Prompts) -> None:
        """Nothing: it reads the text when it starts."""
        del arrays, prompts

    def inputs(
        self, view: View, lattice: Lattice, arrays: NGramArrays, memory: None
    ) -> tuple[NGramInputs, None]:
        """The end of the text, and the counts of its bigrams."""
        del arrays
        cache = None
        if self.adaptive:
            cache = cache_counts(lattice.tokens, view.tokens, view.lengths)
        return NGramInputs(view.last_tokens(self.context_length), cache), memory

    def transitions(
        self,
        arrays: NGramArrays,
        lattice: Lattice,
        inputs: NGramInputs,
        *,
        by_candidate: bool = False,
        all_room: bool = False,
    ) -> Transitions:
        """Scores all steps by the n-gram model."""
        cache, width = inputs.cache, lattice.tokens.shape[-1]
        room = self.room or Room.for_width(width)
        if all_room:
            room = Room.largest(width)
        by_candidate = by_candidate or cache is not None
        columns = _columns(arrays.table, lattice, inputs.context)
        graph = build_graph(arrays.table, columns, room, every_candidate=by_candidate)
        # The last column of the text is the certain token.
        start = columns.predicted.shape[1] - lattice.tokens.shape[1]
        values, following = graph.values[:, start:], graph.following[:, start:]
        candidates = graph.candidates[:, start:]
        first = graph.states[:, start]
        if by_candidate and arrays.table.order == 1:
            # A model of order 1 has a single node, which does not tell candidates.
            shape = (*values.shape[:2], width, width)
            values = jnp.broadcast_to(values, shape)
            following = jnp.broadcast_to(jnp.arange(width), shape)
            candidates = jnp.broadcast_to(jnp.arange(width), shape[:3])
        if cache is not None:
            counts = jnp.take_along_axis(cache, candidates[..., None], axis=2)
            values = mixed(values, counts)
        alpha = arrays.alpha.at(lattice.entropies)[:, :, None, None]
        return Transitions(alpha * values, following, first, candidates, graph.overflow)


@register
@dataclasses.dataclass(frozen=True)
class NGram(RefinerPart):
    """Settings of the refiner `ngram`."""

    name: ClassVar[str] = "ngram"
    help: ClassVar[str] = "an n-gram model, the paper's global rescoring"
    reference: ClassVar[str] = "Kim et al. 2024, section 7.2"
    needs: ClassVar[tuple[str, ...]] = ("ngram",)
    finite: ClassVar[bool] = True

    alpha: float | None = setting(None, *DEFAULT_ALPHA)
    slope: float = setting(0.0, *SLOPE)
    adaptive: int = setting(0, "1 mixes in the bigrams of the text so far", SWITCH)

    def build(self, context: BuildContext, source: Source) -> NGramRefiner:
        """Makes the refiner; methods with the same model share its table."""
        del source
        model: NGramModel = context.need("ngram")
        alpha = self.weight(context)
        table = context.share("ngram table", lambda: device_table(model))
        arrays = NGramArrays(table, Weight.of(alpha, self.slope))
        return NGramRefiner(arrays, max(model.order - 2, 0), bool(self.adaptive))

    def weight(self, context: BuildContext) -> float:
        """α, or the decoder's own."""
        return context.alpha if self.alpha is None else self.alpha

    def label(self, order: int | None = None) -> str:
        """What people read in tables."""
        return f"{order or 'n'}-gram"


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
