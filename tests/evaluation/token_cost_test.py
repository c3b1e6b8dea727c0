"""Costs and sizes of small models; tests/experiments/table11_test.py has others."""

import dataclasses

from bpd_jax.evaluation.token_cost import model_size
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.transformer_config import TransformerConfig


def test_size_of_a_small_model():
    """Two key-value heads of width 4 serve four query heads, without biases.

    A layer has queries and outputs of 8 · 16, keys and values of 8 · 8, and two
    matrices of 8 · 32; norms are 8 each, two a layer and one at the end. A head has
    8 · 6 twice, and the softmax of 11 tokens.
    """
    trunk = TransformerConfig(
        11, 2, 8, 32, num_heads=4, num_kv_heads=2, head_dim=4, max_length=10,
        use_bias=False, norm="rms",
    )  # fmt: skip
    size = model_size(BlockwiseConfig(trunk, BlockHeadsConfig(3, hidden=6)))
    layer = 2 * 8 * 16 + 2 * 8 * 8 + 2 * 8 * 32
    assert size.trunk_weights == 2 * layer + 11 * 8
    assert size.trunk_parameters == 2 * layer + (11 + 10) * 8 + 5 * 8
    assert size.head_parameters >= 2 * 2 * 8 * 6
    assert size.head_weights == 2 * (2 * 8 * 6 + 11 * 8)
    assert (size.layers, size.attention_width, size.kv_width) == (2, 16, 8)
    assert size.kv_bytes == 2 * 2 * 8 * 2
    # Another table of tokens is only looked up.
    untied = BlockwiseConfig(dataclasses.replace(trunk, tied_softmax=False))
    assert model_size(untied).trunk_parameters == size.trunk_parameters
