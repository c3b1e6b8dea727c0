"""Memory traffic and arithmetic per decoded token, by formula.

The three quantities are parameter reads, traffic of the key-value cache, and FLOPs. The
prefix is read once for all drafts of a call, as in attention over a tree of drafts. The
paper's formula, from which this one differs, is in experiments/table11.
"""

import dataclasses

import jax
import numpy as np

from bpd_jax.base.typing import Params
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.parameters import parameter_shapes


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
