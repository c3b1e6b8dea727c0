"""Memory traffic and arithmetic per decoded token, by formula.

Two cost models compute the same three quantities per decoded token: parameter reads,
traffic of the key-value cache, and FLOPs. `printed_cost` is the formula behind the
paper's Table 11, recovered from its cells, all 42 of which it reproduces to the last
digit; `cost` is the corrected formula. They differ as follows:

- The paper uses the width of the feed-forward layer as that of keys and values: its
  cache traffic is 12288 / 1536 = 8 times too large. (For the rescorer it uses 1536,
  4 times the model's width of 384; with attention heads of width 128, the reading that
  gives 61M parameters, 1536 would be correct.)
- In the paper the rescorer is read once per serial call, as in the parallel reading of
  Algorithm 2. In the sequential one each of L - 1 = 8 steps reads it again: 2.306 GB of
  parameters per token, compared with 1.823 GB for plain BPD.
- In the paper the weights are multiplied by one token per call, 2 FLOPs each,
  regardless of the number of draft tokens, and attention is recomputed for all pairs of
  positions, at 8 FLOPs per layer, pair and unit of width: twice the cost of scores and
  weighted sums. The second term is 99.7 % of the 0.931 T of autoregressive decoding.
- The paper includes the block heads' parameters in autoregressive decoding.

In both models the prefix is read once for all drafts of a call, as in attention over a
tree of drafts.
"""

import dataclasses
import functools

import jax
import numpy as np

from bpd_jax.base.typing import Params
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.transformer_config import TransformerConfig

CONTEXTS = (128, 512, 1024, 2048)
"""Lengths of the prefix in tokens for which Table 11 gives cache traffic."""


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that determine its cost.

    Attributes:
      trunk_parameters: number of parameters that a pass reads, without the block heads
        and without an embedding that is not shared with the softmax, of which a pass
        reads only a few rows.
      trunk_weights: number of weights that every token is multiplied by, including the
        softmax.
      head_parameters: number of parameters of heads 2 … L together, without a shared
        softmax.
      head_weights: number of weights of all heads that one hidden state is multiplied
        by, including the softmax.
      layers: number of layers of the trunk.
      attention_width: width of all queries of a layer together.
      kv_width: width of all keys of a layer together, and of its values.
      block_size: L; 1 without block heads.
      value_bytes: bytes of a parameter and of a cached value.
    """

    trunk_parameters: int
    trunk_weights: int
    head_parameters: int
    head_weights: int
    layers: int
    attention_width: int
    kv_width: int
    block_size: int = 1
    value_bytes: float = 2

    @property
    def kv_bytes(self) -> float:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_width * self.value_bytes


def model_size(config: BlockwiseConfig) -> ModelSize:
    """The sizes of a model in half precision."""
    trunk, shapes = config.trunk, parameter_shapes(config)
    heads = shapes.get("heads", {})
    softmax = trunk.vocab_size * trunk.d_model
    drafting = (config.block_size - 1) * config.draft_vocab_size * trunk.d_model
    return ModelSize(
        trunk_parameters=_count(shapes["trunk"]) - (not trunk.tied_softmax) * softmax,
        trunk_weights=_count(shapes["trunk"], "kernel") + softmax,
        head_parameters=_count(heads),
        head_weights=_count(heads, "kernel") + drafting,
        layers=trunk.num_layers,
        attention_width=trunk.num_heads * trunk.head_width,
        kv_width=trunk.kv_heads * trunk.head_width,
        block_size=config.block_size,
    )


def _count(shapes: Params, name: str = "") -> int:
    """Number of parameters in the leaves whose name starts with `name`."""
    return sum(
        int(np.prod(leaf.shape))
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if path[-1].key.startswith(name)
    )


@functools.cache
def paper_sizes() -> tuple[ModelSize, ModelSize]:
    """The paper's 1.5B model and 61M rescorer, as their sizes are read here.

    A gated trunk and eight further heads of width 12288 have 1.57e9 parameters; a
    rescorer with attention heads of width 128 has 62.7e6.
    """
    trunk = TransformerConfig(50257, 18, 1536, 12288, num_heads=12, gated=True)
    rescorer = TransformerConfig(50257, 12, 384, 1536, num_heads=12, head_dim=128)
    return (
        model_size(BlockwiseConfig(trunk, BlockHeadsConfig(9, hidden=12288))),
        model_size(BlockwiseConfig(rescorer)),
    )


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one decoded token.

    Attributes:
      parameter_bytes: bytes of parameters read, of all models.
      kv_bytes: bytes of the cache read and written.
      flops: floating-point operations; a multiply-add counts as two.
    """

    parameter_bytes: float
    kv_bytes: float
    flops: float


def cost(
    model: ModelSize,
    context: int,
    *,
    efficiency: float = 1.0,
    nodes: float = 1.0,
    drafting: bool = True,
    rescorer: ModelSize | None = None,
    passes: int = 0,
    rescored: int = 0,
) -> Cost:
    """The cost of a decoded token.

    One serial call processes the `nodes` tokens of its drafts with the trunk and one
    state with the block heads; it reads the cache of the prefix and writes that of the
    nodes. A rescorer reads its parameters and its cache `passes` times, and processes
    the tokens that the last call yielded and the draft tokens. A call yields
    `efficiency` tokens.

    Args:
      model: sizes of the model that decodes.
      context: tokens of the prefix.
      efficiency: block efficiency.
      nodes: distinct draft tokens that a call verifies.
      drafting: whether the block heads run; False for autoregressive decoding.
      rescorer: a small model that refines drafts, if any.
      passes: passes of the rescorer per call: L - 1 for Algorithm 2, 1 for its
        parallel variant.
      rescored: draft tokens that the rescorer processes per call: L - 2 along one
        draft, because the first token is certain and nothing follows the last one.
    """
    # A draft token attends to the prefix and, on average, half of the draft.
    depth = (model.block_size + 1) / 2 if drafting else 1.0
    parameters = model.value_bytes * model.trunk_parameters
    kv = model.kv_bytes * (context + nodes)
    flops = nodes * _token_flops(model, context + depth)
    if drafting:
        parameters += model.value_bytes * model.head_parameters
        flops += 2 * model.head_weights
    if rescorer is not None:
        parameters += passes * rescorer.value_bytes * rescorer.trunk_parameters
        tokens = efficiency + rescored
        kv += rescorer.kv_bytes * (passes * context + tokens)
        flops += tokens * _token_flops(rescorer, context + depth)
    return Cost(parameters / efficiency, kv / efficiency, flops / efficiency)


def _token_flops(model: ModelSize, attended: float) -> float:
    """FLOPs of one token that attends to `attended` tokens."""
    attention = model.layers * model.attention_width * attended
    return 2 * model.trunk_weights + 2 * 2 * attention


def printed_cost(
    efficiency: float, context: int, *, drafts: int = 0, passes: int = 0
) -> Cost:
    """The formula of Table 11 for the paper's 1.5B model and 61M rescorer.

    Per token, with S the context, p the drafts, BE the block efficiency and
    m = S + 9 p the positions of a call:

        parameters   2 · 1.5e9                  + 2 · 61e6 · n
        cache        2 · 18 · 12288 · 2 · m     + 2 · 12 · 1536 · 2 · (S n + 9)
        FLOPs        2 · 1.5e9 + 8 · 18 · 1536 · m²
                                                + (2 · 61e6 + 8 · 12 · 384 · (S + 9)²) n

    divided by BE, in bytes and FLOPs. The right-hand terms are for neural rescoring
    only, where the table has n = 1. The table prints FLOPs for S = 2048, and divides by
    the printed block efficiency, which has three decimals.

    Args:
      efficiency: mean block efficiency over the seven tasks; 1 for autoregressive
        decoding.
      context: S, in tokens.
      drafts: p; 0 for autoregressive decoding.
      passes: n, number of times that a call reads the rescorer; 0 without one.
    """
    positions = context + 9 * drafts
    parameters = 2 * 1.5e9
    kv = 2 * 18 * 12288 * 2.0 * positions
    flops = 2 * 1.5e9 + 8 * 18 * 1536 * positions**2
    if passes:
        parameters += 2 * 61e6 * passes
        kv += 2 * 12 * 1536 * 2.0 * (context * passes + 9)
        flops += (2 * 61e6 + 8 * 12 * 384 * (context + 9) ** 2) * passes
    return Cost(parameters / efficiency, kv / efficiency, flops / efficiency)
