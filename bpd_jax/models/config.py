"""Sizes and choices of a blockwise language model, as frozen dataclasses."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from bpd_jax.errors import UserError
from bpd_jax.models.rotary import RotaryConfig

ACTIVATIONS = ("gelu", "silu", "relu")
DTYPES = ("float32", "bfloat16", "float16")
NORMS = ("layer", "rms")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A pre-norm decoder-only transformer.

    The defaults are the paper's model, as GPT-2 is built; with `rotary`, `norm="rms"`,
    `gated` and `activation="silu"` it is a Llama.

    Attributes:
      vocab_size: V, number of tokens.
      num_layers: number of transformer blocks.
      d_model: D, width of the residual stream.
      d_ff: F, inner width of the feed-forward layers.
      num_heads: N, query heads.
      num_kv_heads: K, key-value heads; None means N.
      head_dim: H, width of one head; None means D / N.
      max_length: the longest text in tokens; rows of the position table, if any.
      activation: of the feed-forward layers: gelu, silu or relu.
      gated: whether the feed-forward layers multiply by a second, linear branch.
      use_bias: whether projections and layer norms have biases.
      qkv_bias: likewise for queries, keys and values (Qwen2); None means `use_bias`.
      query_key_norm: whether queries and keys are normalised per head (Qwen3).
      norm: `layer`, or `rms` (no mean is subtracted, no bias).
      norm_epsilon: added to the variance.
      rotary: how positions turn queries and keys; None is a learned table, added to
        the token embeddings.
      tied_softmax: whether the softmax is the embedding's transpose.
      dtype: of activations and matrix products.
      param_dtype: of the parameters.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_length: int = 2048
    activation: str = "gelu"
    gated: bool = False
    use_bias: bool = True
    qkv_bias: bool | None = None
    query_key_norm: bool = False
    norm: str = "layer"
    norm_epsilon: float = 1e-5
    rotary: RotaryConfig | None = None
    tied_softmax: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "num_layers",
            "d_model",
            "d_ff",
            "num_heads",
            "max_length",
        ):
            _check_positive("TransformerConfig", name, getattr(self, name))
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
                "positions turn pairs."
            )
        _check_choice("TransformerConfig.activation", self.activation, ACTIVATIONS)
        _check_choice("TransformerConfig.norm", self.norm, NORMS)
        _check_choice("TransformerConfig.dtype", self.dtype, DTYPES)
        _check_choice("TransformerConfig.param_dtype", self.param_dtype, DTYPES)

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


@dataclasses.dataclass(frozen=True)
class BlockHeadsConfig:
    """The L block heads (paper section 4 and appendix C.2).

    The paper leaves width, activation and residual of a head's feed-forward layer
    open. We follow Stern et al. (2018) with a residual, and start its second matrix
    at zero, so that every head begins as the language model's own softmax.

    Attributes:
      num_heads: L, tokens predicted from one hidden state; head 1 is the model.
      hidden: inner width of each head's feed-forward layer.
      activation: gelu, silu or relu.
      residual: whether the hidden state is added to the layer's output.
      first_has_ffn: whether head 1 has a feed-forward layer too. The paper's text
        counts L layers, its appendix L - 1 "additional" ones; the default is L - 1.
    """

    num_heads: int
    hidden: int
    activation: str = "silu"
    residual: bool = True
    first_has_ffn: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "hidden"):
            _check_positive("BlockHeadsConfig", name, getattr(self, name))
        _check_choice("BlockHeadsConfig.activation", self.activation, ACTIVATIONS)

    @property
    def num_ffns(self) -> int:
        """Number of feed-forward layers: L - 1, or L if head 1 has one too."""
        return self.num_heads - (not self.first_has_ffn)


@dataclasses.dataclass(frozen=True)
class BlockwiseConfig:
    """A transformer trunk and its block heads; `heads=None` is a plain model."""

    trunk: TransformerConfig
    heads: BlockHeadsConfig | None = None

    @property
    def block_size(self) -> int:
        """L, the most tokens that one serial call can accept."""
        return 1 if self.heads is None else self.heads.num_heads


def save_config(config: BlockwiseConfig, path: str | os.PathLike[str]) -> None:
    """Writes `config` as JSON."""
    text = json.dumps(dataclasses.asdict(config), indent=2)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def load_config(path: str | os.PathLike[str]) -> BlockwiseConfig:
    """Reads what `save_config` wrote.

    Raises:
      UserError: the file is missing or does not describe a model.
    """
    try:
        fields: dict[str, Any] = json.loads(
            pathlib.Path(path).read_text(encoding="utf-8")
        )
        trunk = trunk_from_fields(fields["trunk"])
        heads = fields["heads"] and BlockHeadsConfig(**fields["heads"])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: is this a run folder?") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not describe a model: {error}.") from error
    return BlockwiseConfig(trunk, heads or None)


def trunk_from_fields(fields: dict[str, Any]) -> TransformerConfig:
    """The inverse of `dataclasses.asdict`."""
    rotary = fields.get("rotary")
    return TransformerConfig(
        **{**fields, "rotary": None if rotary is None else RotaryConfig(**rotary)}
    )


def _check_positive(owner: str, name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{owner}.{name} must be a positive integer, not {value!r}.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
