"""Configuration of a blockwise language model."""

import abc
import dataclasses
from typing import Annotated

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Validated, choice, configurable, integer
from bpd_jax.models.transformer_config import (
    Activation,
    LayerNumbers,
    Layers,
    Size,
    Tokens,
    TransformerConfig,
    check_feature_layers,
)

HEAD_KINDS = ("feed_forward", "medusa")

# Limited, because each block head is traced and compiled separately.
NumHeads = Annotated[int, integer(1, 256)]


@configurable
@dataclasses.dataclass(frozen=True)
class BlockHeadsConfig(Validated):
    """Configuration of the L block heads (paper section 4 and appendix C.2).

    The paper does not specify width, activation and residual of the feed-forward layer
    of a head. As in Stern et al. (2018), there is a residual; the second matrix is
    initialized to zero, so that every head begins as the softmax of the language model.
    `medusa` is the layer of Cai et al. (2024), x + SiLU(W x + b), with W initialized to
    zero.

    Attributes:
      num_heads: L, number of heads; head 1 is the model itself.
      hidden: inner width of the feed-forward layer of each head; None for `medusa`.
      activation: gelu, silu, relu or gelu_exact.
      residual: whether the hidden state is added to the output of the layer.
      first_has_ffn: whether head 1 has a feed-forward layer too. The text of the paper
        counts L layers, its appendix L - 1 "additional" ones; the default is L - 1.
      kind: `feed_forward` or `medusa`.
      layers: number of layers of a medusa head.
      own_softmax: whether each of heads 2 … L has its own trained softmax, as in the
        published checkpoints of Medusa-1.
      draft_vocabulary: V', number of tokens that heads 2 … L choose from, as in FR-Spec
        (Zhao et al. 2025) and EAGLE-3; None for all tokens. Their probabilities are
        normalised over these tokens. Head 1 always has the whole vocabulary.
      reads_anchor: whether heads 2 … L also read the embedding of y_0, the certain
        token. This and `feature_layers` are for feed-forward heads of a frozen model;
        the paper's heads read only the final hidden state.
      feature_layers: layers of the model, counted from 0, whose outputs heads 2 … L
        also read.
      condition: width of the common projection of y_0 and the layers; None for the
        width of the model.
    """

    num_heads: NumHeads
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
        if self.kind == "feed_forward" and self.hidden is None:
            raise UserError(
                "BlockHeadsConfig.hidden must be a positive integer, not None."
            )
        unused = {"feed_forward": ("layers", 1), "medusa": ("hidden", None)}
        name, default = unused[self.kind]
        if getattr(self, name) != default:
            raise UserError(
                f"BlockHeadsConfig.{name} = {getattr(self, name)} does not apply to "
                f"kind {self.kind!r}: remove it."
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
        """Number of heads with their own layers: L - 1, or L with `first_has_ffn`."""
        return self.num_heads - (not self.first_has_ffn)

    @property
    def has_softmax(self) -> bool:
        """Whether heads 2 … L have a separate softmax matrix."""
        return self.own_softmax or self.draft_vocabulary is not None


@dataclasses.dataclass(frozen=True)
class JointDrafter(Validated, abc.ABC):
    """The configuration of a drafter that may be trained together with a trunk.

    Attributes:
      feature_layers: layers of the trunk whose outputs it reads, counted from 0.
      block_size: L, tokens of a block; the first is certain, L - 1 are predicted.
    """

    feature_layers: LayerNumbers = ()
    block_size: Size = 9

    @abc.abstractmethod
    def joined(self, trunk: TransformerConfig) -> "JointDrafter":
        """The configuration with what it leaves to the trunk, checked."""


@configurable
@dataclasses.dataclass(frozen=True)
class BlockwiseConfig(Validated):
    """Configuration of a transformer trunk with block heads or a block drafter.

    Attributes:
      trunk: the language model.
      heads: block heads, or None.
      drafter: a block drafter that is trained together with the trunk instead of heads,
        or None. The drafter of a frozen model is stored separately.
    """

    trunk: TransformerConfig
    heads: BlockHeadsConfig | None = None
    drafter: JointDrafter | None = None

    def check_together(self) -> None:
        if self.draft_vocab_size > self.trunk.vocab_size:
            raise UserError(
                f"BlockHeadsConfig.draft_vocabulary = {self.draft_vocab_size} exceeds "
                f"the {self.trunk.vocab_size} tokens of the vocabulary: lower it."
            )
        check_feature_layers(self.feature_layers, self.trunk.num_layers)
        drafter = self.drafter
        if drafter is None:
            return
        if self.heads is not None:
            raise UserError(
                "BlockwiseConfig has both heads and a drafter: set one of them to None."
            )
        object.__setattr__(self, "drafter", drafter.joined(self.trunk))

    @property
    def block_size(self) -> int:
        """L, highest number of tokens that one serial call accepts with heads."""
        return 1 if self.heads is None else self.heads.num_heads

    @property
    def num_losses(self) -> int:
        """L, number of heads, or block size of the block drafter."""
        return self.block_size if self.drafter is None else self.drafter.block_size

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the trunk whose outputs the heads or the block drafter read."""
        part = self.heads or self.drafter
        return () if part is None else part.feature_layers

    @property
    def draft_vocab_size(self) -> int:
        """V', number of tokens that heads 2 … L choose from."""
        if self.heads is None or self.heads.draft_vocabulary is None:
            return self.trunk.vocab_size
        return self.heads.draft_vocabulary
