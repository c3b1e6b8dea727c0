"""The block heads: their layers, and the softmax and vocabulary of heads 2 … L.

Parameters under `params["heads"]`:

- of the layers, stacked over heads: `kernel_in`, `bias_in`, `kernel_out`, `bias_out` of
  feed-forward heads, `kernel` and `bias` of medusa heads;
- `kernel_side` `[L-1, C, hidden]` and `kernel_condition` `[·, C]` of conditioned heads,
  which also read y_0 and outputs of layers; the latter is shared by all heads;
- `softmax`: with a draft vocabulary, its rows `[V', D]` of the model's softmax, copied
  and not trained; with `own_softmax`, a trained matrix for each of heads 2 … L, `[L-1,
  V', D]`;
- `vocabulary`: `[V']` int32, token ids of the draft vocabulary; not trained.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import AnyArray, Array, Float, Params
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.device_ops import ACTIVATIONS
from bpd_jax.models.layers import named_normal, named_zeros
from bpd_jax.models.partitioning import BLOCK_HEAD, EMBED, MLP, VOCAB, unbox
from bpd_jax.models.products import parameter, product, rows_of
from bpd_jax.models.transformer_config import TransformerConfig

_AXES: dict[str, tuple[str | None, ...]] = {
    "kernel_in": (BLOCK_HEAD, EMBED, MLP),
    "bias_in": (BLOCK_HEAD, MLP),
    "kernel_out": (BLOCK_HEAD, MLP, EMBED),
    "bias_out": (BLOCK_HEAD, EMBED),
    "kernel_side": (BLOCK_HEAD, EMBED, MLP),
    "kernel_condition": (MLP, EMBED),
    "kernel": (BLOCK_HEAD, None, EMBED, MLP),
    "bias": (BLOCK_HEAD, None, EMBED),
}


def layer_shapes(config: BlockHeadsConfig, d_model: int) -> dict[str, tuple[int, ...]]:
    count, layers = config.num_ffns, config.layers
    if config.kind == "medusa":
        return {
            "kernel": (count, layers, d_model, d_model),
            "bias": (count, layers, d_model),
        }
    assert config.hidden is not None
    shapes: dict[str, tuple[int, ...]] = {
        "kernel_in": (count, d_model, config.hidden),
        "bias_in": (count, config.hidden),
        "kernel_out": (count, config.hidden, d_model),
        "bias_out": (count, d_model),
    }
    if config.is_conditioned:
        width = config.condition or d_model
        shapes["kernel_side"] = (count, width, config.hidden)
    return shapes


def head_shapes(
    config: BlockHeadsConfig, d_model: int, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters under `params["heads"]`."""
    shapes = layer_shapes(config, d_model)
    if config.is_conditioned:
        parts = config.reads_anchor + len(config.feature_layers)
        shapes["kernel_condition"] = (parts * d_model, config.condition or d_model)
    rows = config.draft_vocabulary or vocab_size
    if config.own_softmax:
        shapes["softmax"] = (config.num_heads - 1, rows, d_model)
    elif config.draft_vocabulary is not None:
        shapes["softmax"] = (rows, d_model)
    if config.draft_vocabulary is not None:
        shapes["vocabulary"] = (rows,)
    return shapes


def is_trained(config: BlockHeadsConfig, name: str) -> bool:
    """Whether a parameter under `params["heads"]` is trained."""
    if name == "softmax":
        return config.own_softmax
    return name != "vocabulary"


class BlockHeads(nn.Module):
    """The block heads as a Linen module.

    The precisions are those of the trunk.

    Attributes:
      softmax_rows: returns the model's softmax `[V, D]`, with which a separate softmax
        of the heads is initialized.
    """

    config: BlockHeadsConfig
    trunk: TransformerConfig
    softmax_rows: Callable[[], Array]

    def setup(self) -> None:
        trunk = self.trunk
        shapes = head_shapes(self.config, trunk.d_model, trunk.vocab_size)
        weights: Any = {
            name: parameter(
                self, name, self._init(name, shape), shape, trunk.param_dtype
            )
            for name, shape in shapes.items()
        }
        self.layers = {
            name: weights[name] for name in layer_shapes(self.config, trunk.d_model)
        }
        self.kernel_condition = weights.get("kernel_condition")
        self.softmax = weights.get("softmax")
        self.vocabulary = weights.get("vocabulary")

    def _init(self, name: str, shape: tuple[int, ...]) -> Callable[..., Any]:
        if name == "vocabulary":
            # The first tokens, a placeholder for the draft vocabulary.
            return lambda key, shape, dtype: jnp.arange(shape[0], dtype=jnp.int32)
        if name == "softmax":
            return nn.with_logical_partitioning(
                lambda key, shape, dtype: jnp.broadcast_to(
                    self.softmax_rows()[: shape[-2]], shape
                ),
                (BLOCK_HEAD, VOCAB, EMBED)[-len(shape) :],
            )
        if name in ("kernel_in", "kernel_side", "kernel_condition"):
            return named_normal(_AXES[name], shape[-2] ** -0.5)
        # Zero, so that heads are initialized as the model's softmax.
        return named_zeros(_AXES[name])

    def __call__(
        self,
        hidden: Float[Array, "... D"],
        embedded: Float[Array, "... D"] | None = None,
        features: Float[Array, "... F"] | None = None,
    ) -> Float[Array, "... L D"]:
        """The states of all heads, inputs of their softmax.

        `embedded` are the embeddings of y_0, required with `reads_anchor`; `features`
        the concatenated outputs of `feature_layers`, required if there are any.
        """
        side = None
        if self.config.is_conditioned:
            kernel = self.kernel_condition.astype(self.trunk.dtype)
            side = condition(self.config, kernel, embedded, features)
        apply = functools.partial(apply_head, self.config, dtype=self.trunk.dtype)
        # A copy of the inputs for every head: if the heads shared them, XLA would make
        # one product of theirs and rearrange all weights for it.
        count = self.config.num_ffns
        inputs = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (count, *x.shape)), (hidden, side)
        )
        states = jax.vmap(apply, out_axes=-2)(self.layers, *inputs)
        if self.config.first_has_ffn:
            return states
        return jnp.concatenate([hidden[..., None, :], states], axis=-2)


def condition(
    config: BlockHeadsConfig,
    kernel: Float[Array, "I C"],
    embedded: Float[Array, "... D"] | None,
    features: Float[Array, "... F"] | None,
) -> Float[Array, "... C"]:
    """The input of conditioned heads besides the final hidden state.

    Every vector is scaled to a root mean square of 1, because embeddings that are tied
    to the softmax are much smaller than outputs of layers. See `BlockHeads.__call__`;
    `kernel` is `kernel_condition`.
    """
    parts = []
    if config.reads_anchor:
        parts.append(embedded)
    if config.feature_layers and features is not None:
        parts += jnp.split(features, len(config.feature_layers), axis=-1)
    elif config.feature_layers:
        parts.append(None)
    inputs = [unit_rms(part).astype(kernel.dtype) for part in parts if part is not None]
    if len(inputs) < len(parts):
        raise UserError(
            "these block heads read the certain token and outputs of layers: use a "
            "source that provides them."
        )
    return jnp.concatenate(inputs, axis=-1) @ kernel


def apply_head(
    config: BlockHeadsConfig,
    weights: Params,
    hidden: Float[Array, "... D"],
    side: Float[Array, "... C"] | None = None,
    *,
    dtype: str,
) -> Float[Array, "... D"]:
    """Applies the layers of one head.

    `weights` are its slice of the stacked parameters; `side` is the result of
    `condition`, None for heads that are not conditioned; products are in `dtype`.
    """
    activation = ACTIVATIONS[config.activation]

    def times(x: Array, kernel: Array) -> Array:
        return product(x, kernel, 1, dtype)

    def affine(x: Array, kernel: Array, bias: Array) -> Array:
        return times(x, kernel) + bias.astype(dtype)

    def add_residual(state: Array, update: Array) -> Array:
        return state + update if config.residual else update

    if config.kind == "medusa":
        for layer in zip(weights["kernel"], weights["bias"], strict=True):
            hidden = add_residual(hidden, activation(affine(hidden, *layer)))
        return hidden
    inner = affine(hidden, weights["kernel_in"], weights["bias_in"])
    if side is not None:
        inner += times(side, weights["kernel_side"])
    inner = activation(inner)
    update = affine(inner, weights["kernel_out"], weights["bias_out"])
    return add_residual(hidden, update)


def softmax_rows(
    model: BlockwiseConfig, params: Params, vocabulary: AnyArray | None
) -> Any:
    """The rows of the model's softmax for a draft vocabulary, stored as it is.

    `vocabulary`, `[V']` token ids, is None for all rows.
    """
    trunk = params["trunk"]
    matrix = trunk["embedding" if model.trunk.tied_softmax else "softmax"]
    return matrix if vocabulary is None else rows_of(matrix, vocabulary)


def init_heads(
    model: BlockwiseConfig,
    params: Params,
    config: BlockHeadsConfig,
    rng: Array,
    vocabulary: AnyArray | None = None,
) -> Params:
    """Initial parameters of heads for a frozen model, float32.

    The model's own heads are ignored. `vocabulary`, `[V']` int32, are the ids of the
    draft vocabulary, or None.
    """
    assert (vocabulary is None) == (config.draft_vocabulary is None)
    trunk = dataclasses.replace(model.trunk, dtype="float32", param_dtype="float32")
    rows = softmax_rows(model, params, vocabulary).astype(jnp.float32)
    module = BlockHeads(config, trunk, softmax_rows=lambda: rows)
    state = jnp.zeros((1, trunk.d_model))
    features = jnp.zeros((1, len(config.feature_layers) * trunk.d_model))
    heads = unbox(module.init(rng, state, state, features)["params"])
    if vocabulary is not None:
        heads["vocabulary"] = jnp.asarray(vocabulary, jnp.int32)
    return heads


def unit_rms(vectors: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Vectors scaled to a root mean square of 1.

    Embeddings that are tied to the softmax are much smaller than hidden states.
    """
    wide = vectors.astype(jnp.float32)
    square = jnp.mean(jnp.square(wide), -1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + 1e-12)).astype(vectors.dtype)
