"""Configuration of a block drafter."""

import dataclasses
from typing import Annotated, Any

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Natural, Positive, configurable, integer
from bpd_jax.models.blockwise_config import JointDrafter
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.trained_refiners import MarkovConfig
from bpd_jax.models.transformer_config import (
    Activation,
    Heads,
    LayerNumbers,
    Size,
    Tokens,
    TransformerConfig,
    check_feature_layers,
    usual_layers,
)

_FROM_TARGET = (
    "d_ff",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "norm_epsilon",
    "rotary",
)


@configurable
@dataclasses.dataclass(frozen=True)
class BlockDrafterConfig(JointDrafter):
    """Configuration of a block drafter (see `block_drafter`).

    Its width is that of the target, whose embeddings and softmax it uses. Sizes that
    are None are those of the target.

    Attributes:
      feature_layers: layers of the target whose outputs it reads, counted from 0; if
        empty, an early one, one in the middle and one near the end.
      block_size: L, tokens of a block; the first is certain, L - 1 are predicted.
      num_layers: number of transformer layers, 1 to 3 for a small target.
      d_ff: inner width of the feed-forward layers.
      num_heads: N, query heads.
      num_kv_heads: K, key-value heads.
      head_dim: H, width of one head.
      norm_epsilon: constant that norms add to the variance.
      rotary: rotary positions of queries and keys; None for those of the target, or the
        default ones if the target has learned positions.
      activation: activation of the gated feed-forward layers.
      query_key_norm: whether queries and keys are normalised per head (Qwen3).
      qkv_bias: whether the projections of attention have biases.
      window: number of last accepted tokens that a block attends to; None for all. A
        small window bounds the cost of a draft for long texts.
      moving_window: whether the window moves with the position of each query, which is
        part of it (DFlash2), instead of ending where the block begins.
      convolution_taps: number of positions of a block that are mixed before and after
        each layer (DFlash2: 2; see `grouped_convolution`); 0 for none.
      convolution_group: number of features that share the coefficients of a state.
      draft_vocabulary: V', number of tokens that it chooses from; None for all.
      guess_at_anchor: whether the query of the certain token predicts y_1 (DSpark: L -
        1 queries) or only serves as context (DFlash: L queries).
      reads_last_token: whether a linear function of the target's states at the last
        accepted token and of the embedding of y_0, one for each position, is added to
        the queries. Published block drafters do not have it.
      markov_rank: R of a low-rank bigram correction of the logits (DSpark's Markov
        head, which is trained with the drafter); 0 for none.
      markov_reads_state: whether a linear function of the state of the predicted token
        scales the R factors of its correction (the selector of DFlash2).
      confidence: whether it predicts the probability that each prediction is right.
      confidence_reads_markov: whether that prediction also reads the Markov embedding
        of the previous token.
    """

    feature_layers: LayerNumbers = ()
    block_size: Size = 9
    num_layers: Annotated[int, integer(1, 100)] = 2
    d_ff: Size | None = None
    num_heads: Heads | None = None
    num_kv_heads: Size | None = None
    head_dim: Size | None = None
    norm_epsilon: Positive | None = None
    rotary: RotaryConfig | None = None
    activation: Activation = "silu"
    query_key_norm: bool = True
    qkv_bias: bool = False
    window: Size | None = 256
    moving_window: bool = False
    convolution_taps: Natural = 0
    convolution_group: Size = 16
    draft_vocabulary: Tokens | None = None
    guess_at_anchor: bool = True
    reads_last_token: bool = False
    markov_rank: Natural = 0
    markov_reads_state: bool = False
    confidence: bool = False
    confidence_reads_markov: bool = False

    def check_together(self) -> None:
        if self.block_size < 2:
            raise UserError(
                "BlockDrafterConfig.block_size must be at least 2, not 1: the first "
                "token of a block is certain."
            )
        if self.window is not None and self.window < self.block_size:
            raise UserError(
                f"BlockDrafterConfig.window = {self.window} is smaller than block_size "
                f"= {self.block_size}, the tokens that one call may accept: raise it."
            )
        if self.moving_window and self.window is None:
            raise UserError(
                "BlockDrafterConfig.moving_window needs a window: set its length."
            )
        if self.convolution_taps > self.queries:
            raise UserError(
                f"BlockDrafterConfig.convolution_taps = {self.convolution_taps} "
                f"exceeds the {self.queries} queries of a block: lower it."
            )
        if self.markov_reads_state and not self.markov_rank:
            raise UserError(
                "BlockDrafterConfig.markov_reads_state needs a markov_rank above 0."
            )
        if self.confidence_reads_markov and not (self.confidence and self.markov_rank):
            raise UserError(
                "BlockDrafterConfig.confidence_reads_markov needs confidence and a "
                "markov_rank above 0."
            )

    @property
    def queries(self) -> int:
        """Q, number of queries of a block."""
        return self.block_size - self.guess_at_anchor

    def resolve(self, target: TransformerConfig) -> "BlockDrafterConfig":
        """Returns the configuration with what it leaves to the target."""
        layers = self.feature_layers or usual_layers(target.num_layers)
        check_feature_layers(layers, target.num_layers)
        if (self.draft_vocabulary or 0) > target.vocab_size:
            raise UserError(
                f"BlockDrafterConfig.draft_vocabulary = {self.draft_vocabulary} "
                f"exceeds the {target.vocab_size} tokens of the vocabulary: lower it."
            )
        sizes: dict[str, Any] = {name: getattr(target, name) for name in _FROM_TARGET}
        sizes["rotary"] = target.rotary or RotaryConfig()
        sizes["num_kv_heads"] = target.kv_heads
        sizes["head_dim"] = target.head_width
        if self.convolution_taps and target.d_model % self.convolution_group:
            raise UserError(
                f"BlockDrafterConfig.convolution_group = {self.convolution_group} must "
                f"divide the width {target.d_model} of the model."
            )
        missing = [name for name in _FROM_TARGET if getattr(self, name) is None]
        chosen = {name: sizes[name] for name in missing}
        return dataclasses.replace(self, feature_layers=layers, **chosen)

    def joined(self, trunk: TransformerConfig) -> "BlockDrafterConfig":
        if self.draft_vocabulary or self.markov_rank or self.confidence:
            raise UserError(
                "BlockDrafterConfig.draft_vocabulary, markov_rank and confidence are "
                "for block drafters of frozen models (HeadsTrainConfig): remove them."
            )
        layers = self.resolve(trunk).feature_layers
        return dataclasses.replace(self, feature_layers=layers)

    def transformer(self, target: TransformerConfig) -> TransformerConfig:
        """The layers as a transformer with the target's width and precision."""
        resolved = self.resolve(target)
        return TransformerConfig(
            vocab_size=target.vocab_size,
            num_layers=self.num_layers,
            d_model=target.d_model,
            max_length=target.max_length,
            activation=self.activation,
            gated=True,
            use_bias=False,
            qkv_bias=self.qkv_bias,
            output_bias=self.qkv_bias,
            query_key_norm=self.query_key_norm,
            norm="rms",
            dtype=target.dtype,
            param_dtype=target.param_dtype,
            **{name: getattr(resolved, name) for name in _FROM_TARGET},
        )

    def markov(self, target: TransformerConfig) -> MarkovConfig | None:
        """The configuration of the Markov head as a refiner; None without one."""
        if not self.markov_rank:
            return None
        return MarkovConfig(
            vocab_size=target.vocab_size,
            d_model=target.d_model,
            num_heads=self.block_size,
            rank=self.markov_rank,
            outputs=self.draft_vocabulary,
            level_scale=False,
            reads_state=self.markov_reads_state,
        )
