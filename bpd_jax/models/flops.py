"""FLOPs that a blockwise model needs, counted from its sizes.

What counts is the mathematics alone: no recomputation, no optimizer. A multiplication
with addition is two FLOPs, and attention counts every pair of positions, as in PaLM
(Chowdhery et al. 2022, appendix B), whose MFU this is the numerator of.
"""

import jax
import numpy as np

from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.config import BlockwiseConfig


def trunk_weights(model: BlockwiseConfig) -> int:
    """Weights of the trunk that a token is multiplied by, the softmax left out."""
    trunk = parameter_shapes(model)["trunk"]
    return sum(
        int(np.prod(leaf.shape))
        for path, leaf in jax.tree_util.tree_leaves_with_path(trunk)
        if path[-1].key == "kernel"
    )


def head_weights(model: BlockwiseConfig) -> int:
    """Weights of the layers of all block heads, their softmax left out."""
    heads = parameter_shapes(model).get("heads", {})
    return sum(
        int(np.prod(leaf.shape))
        for name, leaf in heads.items()
        if name.startswith("kernel")
    )


def attention_flops(model: BlockwiseConfig, queries: int, keys: int) -> float:
    """Of the scores and the weighted sums of all layers, forward."""
    trunk = model.trunk
    width = trunk.num_layers * trunk.num_heads * trunk.head_width
    return 2.0 * 2.0 * queries * keys * width


def train_flops(model: BlockwiseConfig, batch_size: int, length: int) -> float:
    """Of one step of training: forward, and twice as much backward.

    6 · N · tokens for the N weights of the trunk and of the heads' layers and for the
    softmax of each of the L heads (V · D weights, whether tied or not), and 3 times
    the attention of `length` × `length` positions of each row.

    Args:
      model: sizes.
      batch_size: rows.
      length: tokens of a row.
    """
    trunk = model.trunk
    softmax = model.block_size * trunk.vocab_size * trunk.d_model
    weights = trunk_weights(model) + head_weights(model) + softmax
    attention = batch_size * attention_flops(model, length, length)
    return 6.0 * weights * batch_size * length + 3.0 * attention


def serial_call_flops(
    model: BlockwiseConfig, batch_size: int, nodes: int, context: int
) -> float:
    """Of one turn of decoding: one forward pass over the drafts, then all heads.

    Args:
      model: sizes.
      batch_size: rows.
      nodes: draft tokens of a row; head 1 runs on each.
      context: tokens that each of them sees.
    """
    trunk = model.trunk
    softmax = trunk.vocab_size * trunk.d_model
    per_row = 2.0 * nodes * (trunk_weights(model) + softmax)
    per_row += attention_flops(model, nodes, context)
    if model.heads is not None:
        drafting = (model.block_size - 1) * model.draft_vocab_size * trunk.d_model
        per_row += 2.0 * (head_weights(model) + drafting)
    return batch_size * per_row
