"""An EAGLE-3 drafter: one transformer layer that drafts token by token.

(Li et al. 2025, arXiv 2503.01840.) The pair at position i consists of the token at
i + 1 and of the target's state at i; the layer predicts the token at i + 2 from it. For
accepted tokens the state is fused from outputs of several layers of the target; behind
them, it is the drafter's own output at the position before. The layer attends to all
earlier pairs. Its keys and values depend on the inputs of a pair alone, so that the
context of accepted tokens needs projections, but no attention.

Worked example (the text is `a b c`, then `d` is certain and `e f` is drafted; s is a
state of the target, h an output of the drafter):

    context     (b, s_a) (c, s_b)
    root                          (d, s_c) → h_0, which predicts `e`
    drafts                                 (e, h_0) → h_1, which predicts `f`

Parameters by name, and the corresponding tensors of published checkpoints, in which the
layer is named `midlayer` or `layers.0`:

    feature_norm_i/scale                     input_norm, fc_norm.i
    fusion/kernel [F, D]                     fc
    attention_norm_0, hidden_norm /scale [D] input_layernorm, hidden_norm
    attention_0/{query,key,value}/kernel [2D, heads, H]
                                             self_attn.{q,k,v}_proj
    attention_0/output, mlp_norm_0, mlp_0    self_attn.o_proj, post_attention_…, mlp
    final_norm/scale [D]                     norm
    softmax [V', D], vocabulary [V']         lm_head, d2t
    embedding [V, D]                         embed_tokens, or that of the target
"""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.models.attention_layer import Attention
from bpd_jax.models.block_drafter import draft_tokens
from bpd_jax.models.cache import KeyValues, KVCache, append, cache_of_slots
from bpd_jax.models.candidates import top_candidates
from bpd_jax.models.layers import Projection, norm
from bpd_jax.models.partitioning import EMBED, MLP, unbox
from bpd_jax.models.products import logits
from bpd_jax.models.transformer import FeedForward
from bpd_jax.models.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Configuration of an EAGLE-3 drafter.

    Attributes:
      layer: the layer, as a transformer of one layer with the target's width.
      feature_layers: layers of the target whose outputs are fused, counted from 0.
      feature_norms: number of equal parts of these outputs, each of which is
        normalised; 0 for no norm.
      norm_before_residual: whether the residual connection begins after the norm of
        the state.
      feeds_normalised: whether the outputs that the drafter reads are normalised
        (EAGLE-3.1).
      draft_vocabulary: V', number of tokens that it chooses from; None for all.
    """

    layer: TransformerConfig
    feature_layers: tuple[int, ...]
    feature_norms: int = 0
    norm_before_residual: bool = False
    feeds_normalised: bool = False
    draft_vocabulary: int | None = None


class Eagle(nn.Module):
    """The modules of an EAGLE-3 drafter; for `mesh` see `EagleFunctions`."""

    config: EagleConfig
    mesh: Mesh | None = None

    def setup(self) -> None:
        config, layer = self.config, self.config.layer
        width = layer.d_model
        inputs = len(config.feature_layers) * width
        self.feature_norms = [
            norm(layer, name=f"feature_norm_{part}")
            for part in range(config.feature_norms)
        ]
        self.fusion = Projection(
            (inputs, width), (MLP, EMBED), (EMBED,), layer, use_bias=False
        )
        self.hidden_norm = norm(layer)
        self.attention_norm = norm(layer, name="attention_norm_0")
        self.attention = Attention(
            layer, mesh=self.mesh, inputs=2 * width, name="attention_0"
        )
        self.mlp_norm = norm(layer, name="mlp_norm_0")
        self.mlp = FeedForward(layer, name="mlp_0")
        self.final_norm = norm(layer)

    def fuse(self, features: Float[Array, "... F"]) -> Float[Array, "... D"]:
        """States of the target from outputs of its layers."""
        features = features.astype(self.config.layer.dtype)
        if self.feature_norms:
            parts = jnp.split(features, len(self.feature_norms), axis=-1)
            pairs = zip(self.feature_norms, parts, strict=True)
            features = jnp.concatenate([norm(part) for norm, part in pairs], axis=-1)
        return self.fusion(features)

    def _inputs(
        self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T 2*D"], Float[Array, "B T D"]]:
        """The inputs of attention, and the start of the residual connection."""
        normed = self.hidden_norm(hidden)
        inputs = jnp.concatenate([self.attention_norm(embedded), normed], axis=-1)
        return inputs, normed if self.config.norm_before_residual else hidden

    def keys_values(
        self,
        embedded: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
    ) -> KeyValues:
        """Keys and values of pairs; see `__call__`."""
        inputs, _ = self._inputs(embedded, hidden)
        keys, values = self.attention.keys_values(inputs, positions)
        return KeyValues(keys[None], values[None])

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"],
        cache: KVCache,
        earlier: KeyValues | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """Runs T pairs.

        Args:
          positions: their positions, those of the states in the text.
          mask: the pairs that each of them attends to, besides the cache.
          earlier: keys and values of pairs of drafts, which come first in `mask`.

        Returns:
          The states that follow in drafts; and keys and values of the pairs.
        """
        inputs, x = self._inputs(embedded, hidden)
        update, keys, values = self.attention(
            inputs, positions, mask, cache, 0, earlier
        )
        x += update
        x += self.mlp(self.mlp_norm(x))
        if self.config.feeds_normalised:
            x = self.final_norm(x)
        return x, KeyValues(keys[None], values[None])

    def outputs(self, states: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The inputs of the softmax after states of drafts."""
        return states if self.config.feeds_normalised else self.final_norm(states)

    def initialize(self, features: Float[Array, "B T F"]) -> None:
        """Calls every submodule, to initialize all parameters."""
        hidden = self.fuse(features)
        positions = jnp.zeros(hidden.shape[:2], jnp.int32)
        new = self.keys_values(hidden, hidden, positions)
        cache = cache_of_slots(new, jnp.ones(len(hidden), jnp.int32)).of_layer(0)
        mask = jnp.ones((len(hidden), hidden.shape[1], hidden.shape[1]), bool)
        self.outputs(self(hidden, hidden, positions, mask, cache)[0])
        self.final_norm(hidden)


@flax.struct.dataclass
class EagleCache:
    """The memory of an EAGLE-3 drafter.

    Attributes:
      context: keys and values of the pairs that were read.
      pending: states of the accepted tokens after them, as far as there are any.
    """

    context: KVCache
    pending: Float[Array, "B P D"]


@dataclasses.dataclass(frozen=True)
class EagleFunctions:
    """An EAGLE-3 drafter without its parameters; hashable, hence jit-static.

    Attributes:
      mesh: devices that share the rows and heads of its cache; None for one device.
    """

    config: EagleConfig
    mesh: Mesh | None = None

    @property
    def module(self) -> Eagle:
        return Eagle(self.config, self.mesh)

    def init(self, rng: Array) -> Params:
        """Initial parameters, without softmax, vocabulary and embedding."""
        width = len(self.config.feature_layers) * self.config.layer.d_model
        features = jnp.zeros((1, 1, width))
        variables = self.module.init(rng, features, method="initialize")
        return unbox(variables["params"])

    def embed(self, params: Params, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        return params["embedding"][tokens].astype(self.config.layer.dtype)

    def prefill(
        self,
        params: Params,
        tokens: Int[Array, "B S"],
        features: Float[Array, "B T F"],
        lengths: Int[Array, " B"],
        reach: int,
    ) -> EagleCache:
        """Reads prompts, whose last state is pending.

        The prompts are padded to the longest possible text, of which `features` has T
        tokens. `reach` is P, the most tokens that one serial call accepts.
        """
        hidden = self._apply("fuse", params, features)
        columns = jnp.arange(features.shape[1])
        following = jnp.take(tokens, columns + 1, axis=1, mode="clip")
        positions = jnp.broadcast_to(columns, following.shape)
        embedded = self.embed(params, following)
        new = self._apply("keys_values", params, embedded, hidden, positions)
        slots = max(tokens.shape[1], reach)
        last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)
        pending = jnp.pad(last, [(0, 0), (0, reach - 1), (0, 0)])
        return EagleCache(cache_of_slots(new, lengths - 1, slots), pending)

    def learn(
        self, params: Params, cache: EagleCache, features: Float[Array, "B L F"]
    ) -> EagleCache:
        """Keeps the states of accepted tokens until their next tokens are known."""
        reach = cache.pending.shape[1]
        hidden = self._apply("fuse", params, features[:, :reach])
        missing = reach - hidden.shape[1]
        pending = jnp.pad(hidden, [(0, 0), (0, missing), (0, 0)])
        return dataclasses.replace(cache, pending=pending)

    def read(
        self,
        params: Params,
        cache: EagleCache,
        tokens: Int[Array, "B S"],
        lengths: Int[Array, " B"],
        next_token: Int[Array, " B"],
    ) -> tuple[EagleCache, Float[Array, "B 1 D"]]:
        """Reads the pairs up to the root, that of the certain token.

        Returns the memory with these pairs, and the state of the draft after the root.
        """
        begin = cache.context.lengths
        positions = begin[:, None] + jnp.arange(cache.pending.shape[1])
        following = jnp.where(
            positions + 1 < lengths[:, None],
            jnp.take_along_axis(tokens, positions + 1, axis=1, mode="clip"),
            next_token[:, None],
        )
        embedded = self.embed(params, following)
        pairs = embedded, cache.pending
        new = self._apply("keys_values", params, *pairs, positions)
        counts = lengths - begin
        context = append(cache.context, new, counts)
        # In a finished row no pair is new, and its drafts are not used.
        root = jnp.maximum(counts - 1, 0)[:, None, None]
        before = dataclasses.replace(
            context, lengths=jnp.maximum(context.lengths - 1, 0)
        )
        states, _ = self._apply(
            "__call__",
            params,
            *(jnp.take_along_axis(part, root, axis=1) for part in pairs),
            lengths[:, None] - 1,
            jnp.ones((len(root), 1, 1), bool),
            before.of_layer(0),
        )
        return dataclasses.replace(cache, context=context), states

    def extend(
        self,
        params: Params,
        context: KVCache,
        drafted: KeyValues,
        tokens: Int[Array, "B m"],
        hidden: Float[Array, "B m D"],
        level: int,
        mask: Bool[Array, "B m U+m"],
    ) -> tuple[Float[Array, "B m D"], KeyValues]:
        """Reads the last tokens of m paths, at position `level` of the block.

        Args:
          context: keys and values of the text and the root.
          drafted: keys and values of U pairs of drafts.
          tokens: the last token of each path.
          mask: the drafted pairs of each path, and the m new ones.
        """
        positions = context.lengths[:, None] + level - 1
        return self._apply(
            "__call__",
            params,
            self.embed(params, tokens),
            hidden,
            jnp.broadcast_to(positions, tokens.shape),
            mask,
            context.of_layer(0),
            jax.tree.map(lambda array: array[0], drafted),
        )

    def logits(
        self, params: Params, states: Float[Array, "... D"]
    ) -> Float[Array, "... draft"]:
        """Logits over the draft vocabulary, float32."""
        outputs = self._apply("outputs", params, states)
        dtype = self.config.layer.dtype
        return logits(params, params["softmax"], outputs, dtype)

    def candidates(
        self, params: Params, states: Float[Array, "... D"], width: int
    ) -> tuple[Int[Array, "... W"], Float[Array, "... W"]]:
        """The best tokens after states of drafts, with their log-probabilities."""
        indices, log_probs, _ = top_candidates(self.logits(params, states), width)
        return draft_tokens(params, indices), log_probs

    def _apply(self, method: str, params: Params, *arguments: object) -> Any:
        return self.module.apply({"params": params}, *arguments, method=method)
