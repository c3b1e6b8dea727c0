"""The block drafter: a few transformer layers that read states of the target model.

One pass predicts a complete block (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147;
DFlash2, with `convolution_taps`, `markov_reads_state` and `moving_window`).
y_0, the anchor, is the certain token: the target's choice of the next token. The block
drafter predicts y_1 … y_{L-1} in parallel. Its queries are the target's embedding of
y_0 and a learned mask embedding at the other positions. The keys and values of each
layer are projections of

- the context: outputs of some layers of the target at the accepted tokens,
  concatenated, projected to width D and normalised ("fused"), shared by all layers;
- all queries of the block, without a causal mask.

With `reads_last_token`, which published block drafters do not have, a linear function
of the target's states at the last accepted token and of the embedding of y_0, one for
each position of the block, is added to the queries. Otherwise the queries depend on the
target's states only through attention, which takes much more training to learn.

Layers are those of a Llama with normalised queries and keys (Qwen3). Rotary positions
continue those of the context: y_0 has position n after n accepted tokens. The softmax
is the frozen softmax of the target, restricted to the draft vocabulary if there is one;
the functions at the end lead from states to candidates and their confidences.

Parameters by name, and the corresponding tensors of published checkpoints:

    fusion/kernel [F, D]                     fc
    fusion_norm/scale [D]                    hidden_norm
    mask_embedding [D]                       embed_tokens[mask_token_id]
    query_condition/kernel [F + D, Q·D]      none (`reads_last_token`)
    attention_norm_i, mlp_norm_i /scale [D]  layers.i.input_layernorm, post_attention_…
    attention_i/{query,key,value,output}/kernel, /query_norm, /key_norm
                                             layers.i.self_attn.{q,k,v,o}_proj, …_norm
    mlp_i/{input,gate,output}/kernel         layers.i.mlp.{gate,up,down}_proj
    {attention,mlp}_convolution_i/base [2, taps, D], dynamic/kernel [D, 2·taps·G]
                                             layers.i.{attention,mlp}_conv.base_kernel,
                                             kernel_projection
    final_norm/scale [D]                     norm
    markov/embedding [V, R], output [V', R]  markov_head.markov_w1, markov_w2;
                                             candidate_selector.{predecessor,successor}…
    markov/project [D, R]                    candidate_selector.hidden_projection
    confidence/kernel [D + R, 1], bias [1]   confidence_head.proj
    softmax [V', D], vocabulary [V']         lm_head, d2t; both frozen
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import AnyArray, Array, Float, Int, Params
from bpd_jax.models.cache import KeyValues, KVCache, cache_of_slots
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.grouped_convolution import Convolution, ConvolvedBlock
from bpd_jax.models.layers import Projection, named_normal, norm
from bpd_jax.models.partitioning import EMBED, MLP
from bpd_jax.models.products import StoredMatrix, rows_of
from bpd_jax.models.transformer import Block, block_parts
from bpd_jax.models.transformer_config import TransformerConfig

# Parameters that are not trained.
FROZEN = ("softmax", "vocabulary")

# Probabilities are at least this far from 0 and 1, so that logarithms are finite.
_MARGIN = 1e-6

# Small at initialization, so that it does not dominate the embedding and the context.
_CONDITION_GAIN = 0.2


class BlockDrafter(nn.Module):
    """The layers of a block drafter.

    Attributes:
      config: configuration, which need not be resolved.
      target: the trunk whose states it reads.
      mesh: devices that share the rows and heads of its cache; None for one device.
    """

    config: BlockDrafterConfig
    target: TransformerConfig
    mesh: Mesh | None = None

    def setup(self) -> None:
        config = self.config
        self.layers = layers = config.transformer(self.target)
        width = layers.d_model
        self.fusion = Projection(
            (len(config.feature_layers) * width, width),
            (MLP, EMBED),
            (EMBED,),
            layers,
            use_bias=False,
        )
        self.fusion_norm = norm(layers)
        self.mask_embedding = self.param(
            "mask_embedding",
            named_normal((EMBED,), width**-0.5),
            (width,),
            layers.param_dtype,
        )
        if config.reads_last_token:
            inputs = 1 + len(config.feature_layers)
            self.query_condition = Projection(
                (inputs * width, config.queries * width),
                (EMBED, MLP),
                (MLP,),
                layers,
                gain=_CONDITION_GAIN,
                use_bias=False,
            )
        self.blocks = [self._block(layer) for layer in range(config.num_layers)]
        self.final_norm = norm(layers)
        if config.confidence:
            markov = config.markov_rank if config.confidence_reads_markov else 0
            self.confidence = Projection(
                (width + markov, 1),
                (EMBED, MLP),
                (MLP,),
                layers,
                use_bias=True,
            )

    def _block(self, layer: int) -> Block:
        parts = block_parts(
            self.layers, lambda part: {"name": f"{part}_{layer}"}, mesh=self.mesh
        )
        config = self.config
        if not config.convolution_taps:
            return Block(*parts, layer)
        sizes = self.layers, config.convolution_taps, config.convolution_group
        convolutions = (
            Convolution(*sizes, name=f"{part}_convolution_{layer}")
            for part in ("attention", "mlp")
        )
        return ConvolvedBlock(*parts, layer, *convolutions, config.queries)

    def context(
        self, features: Float[Array, "B T F"], positions: Int[Array, "B T"]
    ) -> KeyValues:
        """Keys and values of accepted tokens in every layer.

        `features` are outputs of `config.feature_layers` of the target, concatenated.
        """
        fused = self.fusion_norm(self.fusion(features.astype(self.layers.dtype)))
        pairs = [block.attention.keys_values(fused, positions) for block in self.blocks]
        keys, values = zip(*pairs, strict=True)
        return KeyValues(jnp.stack(keys), jnp.stack(values))

    def __call__(
        self,
        anchors: Float[Array, "B A D"],
        positions: Int[Array, "B A"],
        context: KVCache,
        last: Float[Array, "B A F"] | None = None,
    ) -> Float[Array, "B A L-1 D"]:
        """The states of the predicted tokens, inputs of the softmax.

        Args:
          anchors: the target's embeddings of A certain tokens per row. Each begins a
            block; blocks do not attend to each other.
          context: keys and values of the text; its `lengths` are numbers of visible
            slots, or a mask `[B, A·Q, S]` with Q = `config.queries`, as for
            `attention`.
          last: outputs of `config.feature_layers` at the tokens before the certain
            tokens; required if `config.reads_last_token`.
        """
        batch, blocks, width = anchors.shape
        queries = self.config.queries
        dtype = self.layers.dtype
        masks = jnp.broadcast_to(
            self.mask_embedding.astype(dtype), (batch, blocks, queries - 1, width)
        )
        x = jnp.concatenate([anchors[:, :, None].astype(dtype), masks], axis=2)
        if self.config.reads_last_token:
            assert last is not None
            x += self._condition(anchors, last).reshape(x.shape)
        x = x.reshape(batch, blocks * queries, width)
        all_positions = (positions[..., None] + jnp.arange(queries)).reshape(batch, -1)
        mask = jnp.ones((batch, blocks, queries, queries), bool)
        for layer, block in enumerate(self.blocks):
            x, _ = block(x, all_positions, mask, context.of_layer(layer))
        x = self.final_norm(x).reshape(batch, blocks, queries, width)
        return x[:, :, queries - (self.config.block_size - 1) :]

    def _condition(
        self, anchors: Float[Array, "B A D"], last: Float[Array, "B A F"]
    ) -> Float[Array, "B A QD"]:
        """The term that is added to the queries; its inputs are normalised."""
        width = anchors.shape[-1]
        inputs = jnp.concatenate([last, anchors.astype(last.dtype)], axis=-1)
        parts = inputs.astype(jnp.float32).reshape(*inputs.shape[:-1], -1, width)
        squares = jnp.mean(parts**2, axis=-1, keepdims=True)
        parts *= jax.lax.rsqrt(squares + self.layers.norm_epsilon)
        parts = parts.reshape(inputs.shape)
        return self.query_condition(parts.astype(self.layers.dtype))

    def confidence_logits(
        self, states: Float[Array, "... D"], previous: Float[Array, "... R"] | None
    ) -> Float[Array, "..."]:
        """Logits of the probability that a predicted token is accepted, float32.

        `previous` are Markov embeddings of the previous tokens, if the head reads them.
        """
        if self.config.confidence_reads_markov:
            assert previous is not None
            states = jnp.concatenate([states, previous.astype(states.dtype)], axis=-1)
        return self.confidence(states)[..., 0].astype(jnp.float32)

    def initialize(self, features: Float[Array, "B T F"]) -> None:
        """Calls every submodule, to initialize all parameters."""
        positions = jnp.zeros(features.shape[:2], jnp.int32)
        new = self.context(features, positions)
        cache = cache_of_slots(new, jnp.ones(len(features), jnp.int32))
        width = self.layers.d_model
        anchors = jnp.zeros((len(features), 1, width))
        states = self(anchors, positions[:, :1], cache, features[:, :1])
        if self.config.confidence:
            self.confidence_logits(
                states, jnp.zeros((*states.shape[:-1], self.config.markov_rank))
            )


def draft_tokens(params: Params, indices: Int[Array, "..."]) -> Int[Array, "..."]:
    """Token ids of indices into the draft vocabulary."""
    return params["vocabulary"][indices] if "vocabulary" in params else indices


def with_softmax(
    params: Params,
    softmax: Float[AnyArray, "V D"] | StoredMatrix,
    vocabulary: AnyArray | None,
) -> Params:
    """Adds the frozen softmax of the target to the trained parameters.

    Without a draft vocabulary, `[V']` int32, it is shared.
    """
    if vocabulary is None:
        return {**params, "softmax": softmax}
    return {
        **params,
        "softmax": rows_of(softmax, vocabulary),
        "vocabulary": jnp.asarray(vocabulary, jnp.int32),
    }


def with_confidence(
    log_probs: Float[Array, "... W"], logits: Float[Array, "..."]
) -> Float[Array, "... W"]:
    """Log-probabilities in which the first candidate has the predicted confidence.

    A confidence head predicts whether the first candidate is accepted. Its prediction c
    replaces the probability p of that candidate, and the other tokens share 1 - c
    instead of 1 - p. Trees are therefore deep where confidence is high, and wide or cut
    (`min_prob`) where it is low. c is raised where the order of the candidates would
    change otherwise.

    >>> log_probs = jnp.log(jnp.array([0.5, 0.3, 0.1]))
    >>> confident = with_confidence(log_probs, jnp.log(0.8 / 0.2))
    >>> [f"{probability:.2f}" for probability in jnp.exp(confident)]
    ['0.80', '0.12', '0.04']

    `log_probs` are of candidates, best first, normalised over the draft vocabulary.
    """
    first = jnp.minimum(jnp.exp(log_probs[..., 0]), 1 - _MARGIN)
    second = jnp.exp(log_probs[..., 1]) if log_probs.shape[-1] > 1 else 0.0
    lowest = second / (1 - first + second)
    confidence = jnp.clip(jax.nn.sigmoid(logits), lowest, 1 - _MARGIN)
    confidence = jnp.maximum(confidence, _MARGIN)
    shared = jnp.log1p(-confidence) - jnp.log1p(-first)
    best = jnp.log(confidence)[..., None]
    # Where c was raised, rounding may leave the second candidate above the first.
    others = jnp.minimum(log_probs[..., 1:] + shared[..., None], best)
    return jnp.concatenate([best, others], axis=-1)
