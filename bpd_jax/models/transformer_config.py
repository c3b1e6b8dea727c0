"""Configuration of a transformer and of its computation, and limits of its sizes."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import (
    Count,
    Positive,
    Validated,
    choice,
    configurable,
    each,
    integer,
)
from bpd_jax.models.rotary import RotaryConfig

ACTIVATIONS = ("gelu", "silu", "relu", "gelu_exact")
DTYPES = ("float32", "bfloat16", "float16")
# Precisions of decoding: dtypes of activations and products; or float32 with products
# of matrices and activations in 8 bits.
INT8 = "int8"
PRECISIONS = (*DTYPES, INT8)
NORMS = ("layer", "rms")
NORM_PLACES = ("before", "after", "both")
ATTENTION = ("auto", "xla", "cudnn", "pallas")
REMAT = ("none", "dots", "full")

MOST_TOKENS = 2**24
"""The largest vocabulary."""

# The limits are far above the sizes of published models. Larger models could not be
# compiled or would not fit into memory.
Size = Annotated[int, integer(1, 2**20)]
Tokens = Annotated[int, integer(1, MOST_TOKENS)]
Heads = Annotated[int, integer(1, 1024)]
Layers = Annotated[int, integer(1, 1000)]
Rank = Annotated[int, integer(1, 2**16)]
LayerNumbers = Annotated[tuple[int, ...], each(integer(0), distinct=True)]
Activation = Annotated[str, choice(*ACTIVATIONS)]
Dtype = Annotated[str, choice(*DTYPES)]

Config = TypeVar("Config")


@configurable
@dataclasses.dataclass(frozen=True)
class TransformerConfig(Validated):
    """Configuration of a decoder-only transformer.

    The defaults are the architecture of GPT-2, which is the paper's; with `rotary`,
    `norm="rms"`, `gated` and `activation="silu"` it is that of Llama.

    Attributes:
      vocab_size: V, number of tokens.
      num_layers: number of transformer blocks.
      d_model: D, width of the residual stream.
      d_ff: F, inner width of the feed-forward layers.
      num_heads: N, query heads.
      num_kv_heads: K, key-value heads; None means N.
      head_dim: H, width of one head; None means D / N.
      max_length: length of the longest text in tokens.
      activation: activation of the feed-forward layers: gelu (the tanh approximation of
        GPT-2), silu, relu or gelu_exact.
      gated: whether the feed-forward layers have a linear gate.
      use_bias: whether projections and layer norms have biases.
      qkv_bias: whether the projections to queries, keys and values have biases (Qwen2);
        None means `use_bias`.
      output_bias: the same for the output projection of attention.
      mlp_bias: the same for the feed-forward layers.
      experts: E, number of feed-forward layers of a block, which are gated (Qwen3-MoE;
        `Experts`); None for one that all tokens use.
      chosen_experts: k, number of them that a token uses.
      normalised_experts: whether the weights of these k sum to 1.
      query_key_norm: whether queries and keys are normalised per head (Qwen3).
      joint_query_key_norm: whether they are so over all heads together (OLMo 2).
      norm: `layer`, or `rms` (without mean and bias).
      norm_place: where attention and feed-forward layers have norms: `before` them,
        `after` them, before the residual connection (OLMo 2), or `both` (Gemma).
      norm_epsilon: constant that is added to the variance.
      rotary: rotary positions of queries and keys; None for learned positions, which
        are added to the token embeddings.
      window: number of last tokens, with itself, that a token attends to in layers with
        a sliding window (Mistral, Qwen2); None for all tokens.
      windowed_layers: the layers with a sliding window, counted from 0; None for all.
      window_rotary: rotary positions of layers with a sliding window (Gemma 3); None
        for those of all.
      unrotated_layers: layers without positions (SmolLM3), counted from 0.
      embedding_scale: factor of the embeddings of tokens (Gemma, Granite).
      attention_scale: factor of attention scores; None is H^-0.5.
      attention_softcap: c, if scores s of attention become c · tanh(s / c) (Gemma 2).
      residual_scale: factor of what each layer adds to the residual stream (Granite).
      logit_softcap: the same as `attention_softcap` for the logits.
      tied_softmax: whether the softmax matrix is the embedding.
      dtype: dtype of activations and matrix products.
      param_dtype: dtype of the parameters.
    """

    vocab_size: Tokens
    num_layers: Layers
    d_model: Size
    d_ff: Size
    num_heads: Heads
    num_kv_heads: Size | None = None
    head_dim: Size | None = None
    max_length: Annotated[int, integer(1, 2**31 - 1)] = 2048
    activation: Activation = "gelu"
    gated: bool = False
    use_bias: bool = True
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    experts: Size | None = None
    chosen_experts: Size = 1
    normalised_experts: bool = False
    query_key_norm: bool = False
    joint_query_key_norm: bool = False
    norm: Annotated[str, choice(*NORMS)] = "layer"
    norm_place: Annotated[str, choice(*NORM_PLACES)] = "before"
    norm_epsilon: Positive = 1e-5
    rotary: RotaryConfig | None = None
    window: Annotated[int, integer(1, 2**31 - 1)] | None = None
    windowed_layers: LayerNumbers | None = None
    window_rotary: RotaryConfig | None = None
    unrotated_layers: LayerNumbers = ()
    embedding_scale: Positive = 1.0
    attention_scale: Positive | None = None
    attention_softcap: Positive | None = None
    residual_scale: Positive = 1.0
    logit_softcap: Positive | None = None
    tied_softmax: bool = True
    dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"

    def check_together(self) -> None:
        if self.head_dim is None and self.d_model % self.num_heads:
            raise UserError(
                f"TransformerConfig.d_model = {self.d_model} is not a multiple of "
                f"num_heads = {self.num_heads}: change one of them or set head_dim."
            )
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"TransformerConfig.num_heads = {self.num_heads} is not a multiple of "
                f"num_kv_heads = {self.num_kv_heads}."
            )
        if self.rotary is not None and self.head_width % 2:
            raise UserError(
                f"TransformerConfig.head_dim = {self.head_width} is odd: rotary "
                "positions rotate pairs of features."
            )
        if self.experts is not None:
            if self.chosen_experts > self.experts:
                raise UserError(
                    f"TransformerConfig.chosen_experts = {self.chosen_experts} exceeds "
                    f"experts = {self.experts}."
                )
            if (
                not self.gated
                or self.mlp_bias
                or (self.mlp_bias is None and self.use_bias)
            ):
                raise UserError(
                    "TransformerConfig.experts needs gated = True and mlp_bias = False."
                )
        for rotary in (self.rotary, self.window_rotary):
            if rotary is not None:
                rotary.frequencies(self.head_width)

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer; None if it attends to all tokens."""
        layers = self.windowed_layers
        return self.window if layers is None or layer in layers else None

    def rotary_of(self, layer: int) -> RotaryConfig | None:
        """The rotary positions of a layer; None if it has none."""
        if layer in self.unrotated_layers:
            return None
        if self.window_rotary is not None and self.window_of(layer) is not None:
            return self.window_rotary
        return self.rotary

    @property
    def kv_heads(self) -> int:
        """K, number of key-value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """H, width of one attention head."""
        return (
            self.d_model // self.num_heads if self.head_dim is None else self.head_dim
        )


def from_fields(kind: Callable[..., Config], fields: dict[str, Any]) -> Config:
    """The inverse of `dataclasses.asdict`, for a configuration with `rotary`."""
    nested = {
        name: RotaryConfig(**fields[name])
        for name in ("rotary", "window_rotary")
        if fields.get(name) is not None
    }
    return kind(**{**fields, **nested})


def check_token_ids(ids: np.ndarray, vocab_size: int, name: str) -> None:
    """Checks that all tokens of the text `name` are in the vocabulary."""
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise UserError(
            f"{name} has token ids outside 0 … {vocab_size - 1}: encode it with the "
            "model's own tokenizer."
        )


def check_feature_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Checks that `layers` are distinct layers of a trunk."""
    known = each(integer(0, num_layers - 1), distinct=True)
    if not known.accepts(layers):
        raise UserError(
            f"the layers {list(layers)} must be different integers from 0 to "
            f"{num_layers - 1}: the model has {num_layers} layers; give "
            f"{', '.join(map(str, usual_layers(num_layers)))}, for example."
        )


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """An early layer of a trunk, one in the middle and one near the end.

    >>> usual_layers(24)
    (1, 12, 22)
    """
    layers = {num_layers // 20, num_layers // 2, max(num_layers - 2, 0)}
    return tuple(sorted(layers))


@configurable
@dataclasses.dataclass(frozen=True)
class ComputeConfig(Validated):
    """Memory and speed of a training step.

    The options change results only by rounding, so they are not part of `model.json`,
    and a run may be resumed with other options.

    Attributes:
      attention: `xla` materializes the attention scores of a few hundred tokens of a
        row at a time; `cudnn` (NVIDIA GPUs of compute capability 8.0 or higher, in
        bfloat16) and `pallas` (TPUs; interpreted on other devices, for tests) are flash
        attention. `auto` is cudnn or pallas where they are supported, and xla
        otherwise.
      remat: the values that each transformer block keeps for its gradient: `none` keeps
        all, `dots` the results of products with its matrices, `full` only its input;
        other values are recomputed.
      loss_chunk: number of positions of a row whose logits are computed at once; None
        for all.
      scan_layers: whether to scan over the layers, with parameters stacked as
        `[layers, …]` under `trunk/layers`, which compiles faster. Checkpoints are
        converted if it changes when a run is resumed.
      accumulate: number of parts that a batch is split into and that are computed one
        after the other; their gradients are accumulated in float32.
    """

    attention: Annotated[str, choice(*ATTENTION)] = "auto"
    remat: Annotated[str, choice(*REMAT)] = "none"
    loss_chunk: Count | None = None
    scan_layers: bool = False
    accumulate: Count = 1
