"""Sizes and choices of a blockwise language model, as frozen dataclasses."""

import dataclasses
import json
import os
import pathlib
from typing import Annotated, Any

from bpd_jax import files
from bpd_jax.errors import UserError
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.settings import Positive, Validated, choice, each, integer

ACTIVATIONS = ("gelu", "silu", "relu", "gelu_exact")
DTYPES = ("float32", "bfloat16", "float16")
NORMS = ("layer", "rms")
HEAD_KINDS = ("feed_forward", "medusa")

MOST_TOKENS = 2**24
"""The largest vocabulary."""

# The limits are far above the sizes of published models. Beyond them compiling would
# not end, or no machine would have the memory.
Size = Annotated[int, integer(1, 2**20)]
Tokens = Annotated[int, integer(1, MOST_TOKENS)]
Heads = Annotated[int, integer(1, 1024)]
Layers = Annotated[int, integer(1, 1000)]
Rank = Annotated[int, integer(1, 2**16)]
# Each block head is traced and compiled by itself.
BlockHeads = Annotated[int, integer(1, 256)]
LayerNumbers = Annotated[tuple[int, ...], each(integer(0), distinct=True)]
Activation = Annotated[str, choice(*ACTIVATIONS)]
Dtype = Annotated[str, choice(*DTYPES)]


@dataclasses.dataclass(frozen=True)
class TransformerConfig(Validated):
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
      activation: of the feed-forward layers: gelu (its tanh form, as GPT-2 has it),
        silu, relu or gelu_exact.
      gated: whether the feed-forward layers multiply by a second, linear branch.
      use_bias: whether projections and layer norms have biases.
      qkv_bias: likewise for queries, keys and values (Qwen2); None means `use_bias`.
      output_bias: likewise for the projection that ends attention.
      mlp_bias: likewise for the feed-forward layers.
      query_key_norm: whether queries and keys are normalised per head (Qwen3).
      norm: `layer`, or `rms` (no mean is subtracted, no bias).
      norm_epsilon: added to the variance.
      rotary: how positions turn queries and keys; None is a learned table, added to
        the token embeddings.
      tied_softmax: whether the softmax is the embedding's transpose.
      dtype: of activations and matrix products.
      param_dtype: of the parameters.
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
    query_key_norm: bool = False
    norm: Annotated[str, choice(*NORMS)] = "layer"
    norm_epsilon: Positive = 1e-5
    rotary: RotaryConfig | None = None
    tied_softmax: bool = True
    dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"

    def check_together(self) -> None:
        """Raises a `UserError` for heads that do not divide the width."""
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
class BlockHeadsConfig(Validated):
    """The L block heads (paper section 4 and appendix C.2).

    The paper leaves width, activation and residual of a head's feed-forward layer
    open. We follow Stern et al. (2018) with a residual, and start its second matrix
    at zero, so that every head begins as the language model's own softmax. `medusa`
    is the layer of Cai et al. (2024), x + SiLU(W x + b), with W zero at first.

    Attributes:
      num_heads: L, tokens predicted from one hidden state; head 1 is the model.
      hidden: inner width of each head's feed-forward layer; `medusa` has none.
      activation: gelu, silu, relu or gelu_exact.
      residual: whether the hidden state is added to the layer's output.
      first_has_ffn: whether head 1 has a feed-forward layer too. The paper's text
        counts L layers, its appendix L - 1 "additional" ones; the default is L - 1.
      kind: `feed_forward` or `medusa`.
      layers: of a medusa head, one after the other.
      own_softmax: whether heads 2 … L have a trained softmax each, as in the published
        checkpoints of Medusa-1, in place of the model's.
      draft_vocabulary: V', number of tokens that heads 2 … L choose from, as in FR-Spec
        (Zhao et al. 2025) and EAGLE-3; None for the whole vocabulary. Their
        probabilities are over these tokens. Head 1 always has the whole vocabulary.
      reads_anchor: whether heads 2 … L also read the embedding of y_0, the certain
        token that the model itself says next. This and `feature_layers` are for
        feed-forward heads of a model that has been trained already; the paper's heads
        read the final hidden state alone.
      feature_layers: layers of the model, counted from 0, whose outputs heads 2 … L
        also read.
      condition: width that y_0 and the layers are projected to, together and once for
        all heads; None for the model's width.
    """

    num_heads: BlockHeads
    hidden: Size | None = None
    activation: Activation = "silu"
    residual: bool = True
    first_has_ffn: bool = False
    kind: Annotated[str, choice(*HEAD_KINDS)] = "feed_forward"
    layers: Layers = 1
    own_softmax: bool = False
    draft_vocabulary: Tokens | None = None
    reads_anchor: bool = False
    feature_layers: LayerNumbers = ()
    condition: Size | None = None

    def check_together(self) -> None:
        """Raises a `UserError` for settings of another kind of heads."""
        if self.kind == "feed_forward" and self.hidden is None:
            raise UserError(
                "BlockHeadsConfig.hidden must be a positive integer, not None."
            )
        pointless = {"feed_forward": ("layers", 1), "medusa": ("hidden", None)}
        name, default = pointless[self.kind]
        if getattr(self, name) != default:
            raise UserError(
                f"BlockHeadsConfig.{name} = {getattr(self, name)} has no meaning with "
                f"kind {self.kind!r}: leave it out."
            )
        if self.is_conditioned and (
            self.kind != "feed_forward" or self.first_has_ffn or self.own_softmax
        ):
            raise UserError(
                "BlockHeadsConfig.reads_anchor and feature_layers are for feed-forward "
                "heads with the model's softmax, without first_has_ffn."
            )

    @property
    def is_conditioned(self) -> bool:
        """Whether heads 2 … L read more than the final hidden state."""
        return self.reads_anchor or bool(self.feature_layers)

    @property
    def num_ffns(self) -> int:
        """Number of heads with layers of their own: L - 1, or L if head 1 has one."""
        return self.num_heads - (not self.first_has_ffn)

    @property
    def has_softmax(self) -> bool:
        """Whether heads 2 … L have another softmax matrix than the model's."""
        return self.own_softmax or self.draft_vocabulary is not None


@dataclasses.dataclass(frozen=True)
class BlockwiseConfig(Validated):
    """A transformer trunk and its block heads; `heads=None` is a plain model."""

    trunk: TransformerConfig
    heads: BlockHeadsConfig | None = None

    def check_together(self) -> None:
        """Raises a `UserError` for heads that do not fit the trunk."""
        if self.draft_vocab_size > self.trunk.vocab_size:
            raise UserError(
                f"BlockHeadsConfig.draft_vocabulary = {self.draft_vocab_size} exceeds "
                f"the {self.trunk.vocab_size} tokens of the vocabulary: lower it."
            )
        if self.heads is not None:
            layers = self.heads.feature_layers
            check_feature_layers(layers, self.trunk.num_layers)

    @property
    def block_size(self) -> int:
        """L, the most tokens that one serial call can accept."""
        return 1 if self.heads is None else self.heads.num_heads

    @property
    def draft_vocab_size(self) -> int:
        """V', number of tokens that heads 2 … L choose from."""
        if self.heads is None or self.heads.draft_vocabulary is None:
            return self.trunk.vocab_size
        return self.heads.draft_vocabulary


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
        fields: dict[str, Any] = files.read_json(path)
        trunk = trunk_from_fields(fields["trunk"])
        heads = fields["heads"] and BlockHeadsConfig(**fields["heads"])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: is this a run folder?") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} does not describe a model: {error}.") from error
    return BlockwiseConfig(trunk, heads or None)


def trunk_from_fields(fields: dict[str, Any]) -> TransformerConfig:
    """The inverse of `dataclasses.asdict`."""
    rotary = fields.get("rotary")
    return TransformerConfig(
        **{**fields, "rotary": None if rotary is None else RotaryConfig(**rotary)}
    )


def check_feature_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Raises a `UserError` unless `layers` are different layers of a trunk."""
    known = each(integer(0, num_layers - 1), distinct=True)
    if not known.accepts(layers):
        raise UserError(
            f"the layers {list(layers)} must be different integers from 0 to "
            f"{num_layers - 1}: the model has {num_layers} layers."
        )
