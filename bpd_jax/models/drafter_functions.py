"""A block drafter as functions of its parameters, which decoding and training call.

In decoding, the cache has keys and values of the n accepted tokens of a row, and the
certain token y_0 is at position n:

    cache = functions.prefill(params, features, lengths, slots)
    tokens, log_probs, entropies, factors = functions.candidates(
        params, cache, embedded, positions, width
    )
    cache = functions.append(params, cache, features_of_accepted_tokens, counts)
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.models.block_drafter import BlockDrafter, draft_tokens, with_confidence
from bpd_jax.models.cache import (
    KeyValues,
    KVCache,
    append,
    cache_of_slots,
    slot_positions,
    visible_part,
)
from bpd_jax.models.candidates import Perturbation, top_candidates
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.partitioning import unbox
from bpd_jax.models.products import logits
from bpd_jax.models.trained_refiners import (
    MarkovConfig,
    markov_factors,
)
from bpd_jax.models.transformer_config import TransformerConfig


@flax.struct.dataclass
class DrafterCache:
    """The cache of a block drafter.

    Attributes:
      context: keys and values of the last S accepted tokens; see `append` in `cache`.
      last: outputs of `feature_layers` at the last accepted token; None without
        `BlockDrafterConfig.reads_last_token`.
    """

    context: KVCache
    last: Float[Array, "B F"] | None = None

    @property
    def lengths(self) -> Int[Array, " B"]:
        """Number of accepted tokens of each row, which may exceed S."""
        return self.context.lengths


@dataclasses.dataclass(frozen=True)
class DrafterFunctions:
    """A block drafter without its parameters; hashable, hence jit-static.

    Attributes:
      config: configuration, which need not be resolved.
      target: the trunk whose states it reads. Its `dtype` is used for computation.
      mesh: devices that share the rows and heads of its cache; None for one device.
    """

    config: BlockDrafterConfig
    target: TransformerConfig
    mesh: Mesh | None = None

    @property
    def module(self) -> BlockDrafter:
        return BlockDrafter(self.config, self.target, self.mesh)

    def init(self, rng: Array) -> Params:
        """Initial trained parameters, without those in `FROZEN`."""
        layers, markov = jax.random.split(rng)
        width = len(self.config.feature_layers) * self.target.d_model
        features = jnp.zeros((1, 1, width))
        variables = self.module.init(layers, features, method="initialize")
        params = unbox(variables["params"])
        config = self.config.markov(self.target)
        if config is not None:
            params["markov"] = config.init(markov)
        return params

    def slots(self, length: int) -> int:
        """S, number of slots of the cache for texts of up to `length` tokens.

        At least L, so that the tokens of one call have distinct slots.
        """
        window = self.config.window or length
        return max(self.config.block_size, min(window, length))

    def context_keys_values(
        self,
        params: Params,
        features: Float[Array, "B T F"],
        positions: Int[Array, "B T"],
    ) -> KeyValues:
        """Keys and values of accepted tokens; see `BlockDrafter.context`."""
        return self.module.apply(
            {"params": params}, features, positions, method="context"
        )

    def prefill(
        self,
        params: Params,
        features: Float[Array, "B T F"],
        lengths: Int[Array, " B"],
        length: int,
    ) -> DrafterCache:
        """The cache after the last S tokens of prompts.

        Prompts are padded; `length` is that of the longest possible text.
        """
        slots, read = self.slots(length), features
        if features.shape[1] > slots:
            positions = slot_positions(lengths, slots)
            # Empty slots have the features of arbitrary tokens.
            index = positions[..., None]
            read = jnp.take_along_axis(features, index, axis=1, mode="clip")
        else:
            columns = jnp.arange(features.shape[1])
            positions = jnp.broadcast_to(columns, features.shape[:2])
        new = self.context_keys_values(params, read, positions)
        context = cache_of_slots(new, lengths, slots)
        return DrafterCache(context, self._last(features, lengths))

    def append(
        self,
        params: Params,
        cache: DrafterCache,
        features: Float[Array, "B L F"],
        counts: Int[Array, " B"],
    ) -> DrafterCache:
        """Appends the first `counts[b]` of L accepted tokens to row b."""
        positions = cache.lengths[:, None] + jnp.arange(features.shape[1])
        new = self.context_keys_values(params, features, positions)
        last = self._last(features, counts)
        if last is not None:
            assert cache.last is not None
            last = jnp.where((counts > 0)[:, None], last, cache.last)
        return DrafterCache(append(cache.context, new, counts), last)

    def _last(
        self, features: Float[Array, "B T F"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B F"] | None:
        """Features of the last token of each row, with `reads_last_token`."""
        if not self.config.reads_last_token:
            return None
        index = jnp.maximum(lengths - 1, 0)[:, None, None]
        return jnp.take_along_axis(features, index, axis=1)[:, 0]

    def states(
        self, params: Params, cache: DrafterCache, anchors: Float[Array, "B D"]
    ) -> Float[Array, "B L-1 D"]:
        """States of the predicted tokens.

        `anchors` are the target's embeddings of the certain tokens, at positions
        `cache.lengths`.
        """
        context = visible_part(cache.context)
        if self.config.moving_window:
            ends, slots = cache.lengths[:, None], context.slots
            positions = slot_positions(cache.lengths, slots)
            seen = (jnp.arange(slots) < ends)[:, None]
            seen &= self._reached(ends, positions)[:, 0]
            context = dataclasses.replace(context, lengths=seen)
        states = self.module.apply(
            {"params": params},
            anchors[:, None],
            cache.lengths[:, None],
            context,
            None if cache.last is None else cache.last[:, None],
        )
        return states[:, 0]

    def logits(
        self, params: Params, states: Float[Array, "... D"]
    ) -> Float[Array, "... draft"]:
        """Logits over the draft vocabulary, float32, without a Markov correction."""
        return logits(params, params["softmax"], states, self.target.dtype)

    def candidates(
        self,
        params: Params,
        cache: DrafterCache,
        anchors: Float[Array, "B D"],
        positions: int,
        width: int,
        perturb: Perturbation | None = None,
    ) -> tuple[
        Int[Array, "B P W"],
        Float[Array, "B P W"],
        Float[Array, "B P"],
        Float[Array, "B P R"] | None,
    ]:
        """Best tokens of positions 1 … P, at most L-1; see `Model.block_candidates`.

        Returns:
          Tokens, best first; their log-probabilities over the draft vocabulary,
          float32, after `with_confidence` if there is a confidence head and no Markov
          head; the entropies of the positions, in nats; and `Lattice.factors`.
        """
        states = self.states(params, cache, anchors)[:, :positions]
        factors = None
        if self.config.markov_reads_state:
            factors = markov_factors(params["markov"], states)
        return (*self.best(params, states, width, perturb), factors)

    def best(
        self,
        params: Params,
        states: Float[Array, "... D"],
        width: int,
        perturb: Perturbation | None = None,
    ) -> tuple[Int[Array, "... W"], Float[Array, "... W"], Float[Array, "..."]]:
        """The best tokens by state; see `candidates`."""
        if perturb is not None and "vocabulary" in params:
            perturb = functools.partial(perturb, tokens=params["vocabulary"])
        indices, log_probs, entropies = top_candidates(
            self.logits(params, states), width, perturb
        )
        # With a Markov head, the confidence is that of the corrected first candidate.
        if self.config.confidence and not self.config.markov_rank:
            confidences = self.confidence_logits(params, states)
            log_probs = with_confidence(log_probs, confidences)
        return draft_tokens(params, indices), log_probs, entropies

    def confidence_logits(
        self,
        params: Params,
        states: Float[Array, "... D"],
        previous: Int[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        """Logits of the probabilities that tokens are accepted, float32.

        `previous` are the previous tokens; required with `confidence_reads_markov`.
        """
        embedded = None
        if self.config.confidence_reads_markov:
            assert previous is not None
            embedded = params["markov"]["embedding"][previous]
        return self.module.apply(
            {"params": params}, states, embedded, method="confidence_logits"
        )

    def teacher_forced_states(
        self,
        params: Params,
        features: Float[Array, "B T F"],
        positions: Int[Array, "B T"],
        anchors: Float[Array, "B A D"],
        anchor_indices: Int[Array, "B A"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B A L-1 D"]:
        """States of A blocks in each of B rows of text.

        Equals `states` with a cache of the tokens before each anchor, for all anchors
        at once. Anchors attend only to tokens of their row.

        Args:
          anchor_indices: indices of the certain tokens in their rows, 1 … T.
          segment_ids: the text of each token in packed rows; None if rows are single
            texts.
        """
        last = anchor_indices - 1
        context = cache_of_slots(
            self.context_keys_values(params, features, positions), last[:, 0]
        )
        *rows, length = features.shape[:2]
        visible = self._visible(anchor_indices, segment_ids, length)
        return self.module.apply(
            {"params": params},
            anchors,
            jnp.take_along_axis(positions, last, axis=1) + 1,
            dataclasses.replace(context, lengths=visible.reshape(*rows, -1, length)),
            jnp.take_along_axis(features, last[..., None], axis=1)
            if self.config.reads_last_token
            else None,
        )

    def _visible(
        self,
        anchor_indices: Int[Array, "B A"],
        segment_ids: Int[Array, "B T"] | None,
        length: int,
    ) -> Bool[Array, "B A Q T"]:
        """Whether each query attends to each token: the last ones before its anchor."""
        tokens = jnp.arange(length)
        visible = tokens < anchor_indices[..., None]
        if segment_ids is not None:
            text = jnp.take_along_axis(segment_ids, anchor_indices - 1, axis=1)
            visible &= segment_ids[:, None] == text[..., None]
        return visible[:, :, None] & self._reached(anchor_indices, tokens[None])

    def _reached(
        self, ends: Int[Array, "B A"], tokens: Int[Array, "#B T"]
    ) -> Bool[Array, "B A Q T"]:
        """Whether tokens are within the window of each query of blocks at `ends`."""
        offsets = jnp.arange(self.config.queries)
        first = jnp.zeros((*ends.shape, len(offsets)), ends.dtype)
        if self.config.window is not None:
            first += ends[..., None] - self.config.window
            if self.config.moving_window:
                first += offsets + 1
        return tokens[:, None, None] >= first[..., None]


def markov_refiner(
    functions: DrafterFunctions, params: Params
) -> tuple[MarkovConfig, Params]:
    """The Markov head as a refiner of lattices, with token ids of the target.

    The rows of tokens outside the draft vocabulary, which are never candidates, are 0.
    """
    config = functions.config.markov(functions.target)
    if config is None:
        raise UserError(
            "the block drafter has no Markov head: train one with markov_rank."
        )
    head = params["markov"]
    if "vocabulary" in params:
        rows = jnp.zeros((config.vocab_size, config.rank), head["output"].dtype)
        head = {**head, "output": rows.at[params["vocabulary"]].set(head["output"])}
    return dataclasses.replace(config, outputs=None), head
