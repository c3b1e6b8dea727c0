"""An n-gram model as a refiner, optionally mixed with the bigrams of the text."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.settings import SWITCH, check_value, number, setting
from bpd_jax.base.typing import AnyArray, Array, Float, Int
from bpd_jax.drafting.interface import Source, View
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.parts import BuildContext, RefinerPart, register
from bpd_jax.drafting.refiners.lattice_graph import Columns, Room, build_graph
from bpd_jax.drafting.refiners.transitions import (
    DEFAULT_ALPHA,
    SLOPE,
    FiniteRefiner,
    Transitions,
    Weight,
    WeightedParams,
)
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.search.device_table import DeviceTable

# Number of occurrences of a token at which the cache and the model have equal weights.
STRENGTH = 1.0


def device_table(model: NGramModel) -> DeviceTable:
    """The table of a model on the device; tokens without a probability get -1000."""
    return jax.device_put(DeviceTable.from_model(model.with_finite_scores()))


@flax.struct.dataclass
class NGramInputs:
    """The inputs of the refiner besides the lattice.

    Attributes:
      context: the last C tokens of the text before the block, padded with -1.
      cache: bigram counts of the candidates in the text (`cache_counts`), or None.
    """

    context: Int[AnyArray, "B C"]
    cache: Float[Array, "B L-1 W W+1"] | None = None


@dataclasses.dataclass(frozen=True)
class NGramRefiner(FiniteRefiner):
    """α · log p_ngram, where p_ngram may be mixed with the bigrams of the text.

    Rows of a batch that need more slots than `Room.for_width` provides lack some
    n-grams. The exact search repeats them with more slots; in other searches their
    drafts are slightly worse.

    Attributes:
      context_length: number of tokens before the certain token that are read.
      adaptive: whether to mix in the bigrams of prompt and text, because names, numbers
        and phrases recur within a text.
      room: slots for longer n-grams; None for `Room.for_width`.
    """

    arrays: WeightedParams = dataclasses.field(compare=False)
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
    ) -> "NGramRefiner":
        """Puts a model on the device.

        Args:
          model: a back-off n-gram model over the same token ids; tokens without a
            probability get log-probability -1000 (`with_finite_scores`).
          alpha: weight of the n-gram's log-probability.
          slope: slope of the weight; see `Weight`.
        """
        check_value("alpha", alpha, number(0))
        arrays = WeightedParams(Weight.of(alpha, slope), device_table(model))
        return cls(arrays, max(model.order - 2, 0), adaptive)

    def inputs(
        self, view: View, lattice: Lattice, arrays: WeightedParams, memory: None
    ) -> tuple[NGramInputs, None]:
        """The end of the text, and its bigram counts."""
        cache = None
        if self.adaptive:
            cache = cache_counts(lattice.tokens, view.tokens, view.lengths)
        return NGramInputs(view.last_tokens(self.context_length), cache), memory

    def transitions(
        self,
        arrays: WeightedParams,
        lattice: Lattice,
        inputs: NGramInputs,
        *,
        by_candidate: bool = False,
        all_room: bool = False,
    ) -> Transitions:
        """Transitions of the n-gram model."""
        table: DeviceTable = arrays.params
        cache, width = inputs.cache, lattice.tokens.shape[-1]
        room = self.room or Room.for_width(width)
        if all_room:
            room = Room.largest(width)
        by_candidate = by_candidate or cache is not None
        columns = _columns(table, lattice, inputs.context)
        graph = build_graph(table, columns, room, every_candidate=by_candidate)
        # The last column of the text is the certain token.
        start = columns.predicted.shape[1] - lattice.tokens.shape[1]
        values, following = graph.values[:, start:], graph.following[:, start:]
        candidates = graph.candidates[:, start:]
        first = graph.states[:, start]
        if by_candidate and table.order == 1:
            # The single node of a model of order 1 does not identify the candidate.
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

    name = "ngram"
    help = "an n-gram model, the paper's global rescoring"
    reference = "Kim et al. 2024, section 7.2"
    needs = ("ngram",)
    finite = True

    alpha: float | None = setting(None, *DEFAULT_ALPHA)
    slope: float = setting(0.0, *SLOPE)
    adaptive: int = setting(0, "1 mixes in the bigrams of the text so far", SWITCH)

    def build(self, context: BuildContext, source: Source) -> NGramRefiner:
        """Builds the refiner; methods with the same model share its table."""
        model: NGramModel = context.need("ngram")
        alpha = context.alpha if self.alpha is None else self.alpha
        table = context.share("ngram table", lambda: device_table(model))
        arrays = WeightedParams(Weight.of(alpha, self.slope), table)
        return NGramRefiner(arrays, max(model.order - 2, 0), bool(self.adaptive))

    def host_weight(self, context: BuildContext) -> tuple[float, float] | None:
        """α and its slope, unless the model is adaptive."""
        alpha = context.alpha if self.alpha is None else self.alpha
        return None if self.adaptive else (alpha, self.slope)

    def label(self, order: int | None = None) -> str:
        return f"{order or 'n'}-gram"


def _columns(
    table: DeviceTable, lattice: Lattice, context: Int[AnyArray, "B C"]
) -> Columns:
    """The columns of the text and of the lattice."""
    width = lattice.tokens.shape[-1]
    # The certain token is the last column of the text.
    first = jnp.arange(width) == 0
    text = jnp.where(first, context[:, :, None], -1)
    certain = jnp.where(first, lattice.tokens[:, :1], -1)
    tokens = jnp.concatenate([text, certain, lattice.tokens[:, 1:]], axis=1)

    def with_end(symbol: int) -> Int[Array, "B T W"]:
        if table.end_of_text is None:
            return tokens
        return jnp.where(tokens == table.end_of_text, symbol, tokens)

    return Columns(
        predicted=with_end(trie.eos_symbol(table.vocab_size)),
        followed=with_end(trie.bos_symbol(table.vocab_size)),
        valid=tokens >= 0,
    )


def cache_counts(
    candidates: Int[Array, "B L W"],
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B L-1 W W+1"]:
    """Counts of the bigrams of candidate v and candidate w at the next position.

    They are counted in the tokens on the device, by one matrix product per position.
    The last entry of each row is the count of v, except at the end of the text. The
    certain token counts as part of the text.
    """
    places, last = jnp.arange(tokens.shape[1]), lengths[:, None]
    tokens = jnp.where(places == last, candidates[:, 0, :1], tokens)
    inside = places <= last
    # No token is -1.
    tokens = jnp.where(inside, tokens, -1)[:, None, None]
    before = candidates[:, :-1, :, None] == tokens
    after = candidates[:, 1:, :, None] == tokens
    followed = before[..., :-1] & inside[:, None, None, 1:]
    pairs = jnp.einsum(
        "BLVS,BLWS->BLVW",
        followed.astype(jnp.float32),
        after[..., 1:].astype(jnp.float32),
    )
    totals = followed.sum(-1, dtype=jnp.float32)
    return jnp.concatenate([pairs, totals[..., None]], axis=-1)


def mixed(
    log_probs: Float[Array, "B J N W"], counts: Float[Array, "B J N W+1"]
) -> Float[Array, "B J N W"]:
    """log((1 - λ) p + λ c(v w) / c(v)), with λ = c(v) / (c(v) + STRENGTH).

    Args:
      log_probs: log-probabilities of the model.
      counts: counts of each node's last token v; see `cache_counts`.
    """
    total = counts[..., -1:]
    # In logarithms, because the smallest probabilities underflow in float32.
    seen = jnp.logaddexp(jnp.log(STRENGTH) + log_probs, jnp.log(counts[..., :-1]))
    return seen - jnp.log(STRENGTH + total)
