"""Costs of a small model by hand, and the paper's Table 11."""

import dataclasses

import pytest

from bpd_jax.evaluation.token_cost import (
    CONTEXTS,
    Cost,
    ModelSize,
    cost,
    model_size,
    paper_sizes,
    printed_cost,
)
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.studies.printed import TABLE11

# Keys and values of a token take 2 · 3 · 5 · 2 = 60 bytes.
SMALL = ModelSize(
    trunk_parameters=1000,
    trunk_weights=900,
    head_parameters=100,
    head_weights=400,
    layers=3,
    attention_width=10,
    kv_width=5,
    block_size=3,
)
RESCORER = ModelSize(50, 40, 0, 0, layers=1, attention_width=4, kv_width=4)


def test_cost_of_plain_decoding():
    """2 · 1000 bytes; 60 · (7 + 1); 2 · 900 + 4 · 3 · 10 · 8 FLOPs."""
    assert cost(SMALL, 7, drafting=False) == Cost(2000, 480, 1800 + 960)


def test_cost_of_a_call_is_shared_by_its_tokens():
    """Per call 2 · 1100 bytes; 60 · (7 + 4); four nodes, each 1800 + 4 · 30 · (7 + 2)
    FLOPs, and 2 · 400 of the heads. Two tokens of five sequences share the first, two
    tokens of one the others."""
    result = cost(SMALL, 7, efficiency=2, nodes=4, batch=5)
    assert result == Cost(220, 330, (4 * (1800 + 1080) + 800) / 2)


@pytest.mark.parametrize(("passes", "rescored"), [(1, 1), (2, 1), (2, 16)])
def test_rescorer_is_read_in_every_pass(passes, rescored):
    """It reads 2 · 50 bytes and a cache of 16 bytes a token in every pass, and runs the
    two tokens of the last call and those of the drafts, each 2 · 40 + 4 · 4 · (7 + 2)
    FLOPs. Two tokens share that."""
    plain = cost(SMALL, 7, efficiency=2, nodes=3)
    with_rescorer = cost(
        SMALL, 7, efficiency=2, nodes=3, rescorer=RESCORER,
        passes=passes, rescored=rescored,
    )  # fmt: skip
    tokens = 2 + rescored
    assert with_rescorer.parameter_bytes - plain.parameter_bytes == 50 * passes
    assert with_rescorer.kv_bytes - plain.kv_bytes == 8 * (7 * passes + tokens)
    assert with_rescorer.flops - plain.flops == tokens * (80 + 144) / 2


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


@pytest.mark.parametrize(
    ("row", "drafts", "passes"),
    [
        ("autoregressive", 0, 0),
        ("bpd", 1, 0),
        ("4g", 1, 0),
        ("61M", 1, 1),
        ("16x0g", 16, 0),
        ("16x4g", 16, 0),
    ],
)
def test_formulas_reproduce_every_printed_cell(row, drafts, passes):
    """Parameters, cache traffic and FLOPs to the last of three decimals."""
    cells = TABLE11[row]
    costs = {
        context: printed_cost(
            cells["efficiency"], context, drafts=drafts, passes=passes
        )
        for context in CONTEXTS
    }
    computed = {
        "parameters": costs[2048].parameter_bytes / 1e9,
        **{f"kv_{context}": costs[context].kv_bytes / 1e9 for context in CONTEXTS},
        "flops": costs[2048].flops / 1e12,
    }
    assert {name: round(value, 3) for name, value in computed.items()} == {
        name: value for name, value in cells.items() if name != "efficiency"
    }


def test_cost_of_reading_the_rescorer_at_every_step():
    """(3 + 8 · 0.122) / 1.7243 = 2.306 GB."""
    steps = printed_cost(12.07 / 7, 2048, drafts=1, passes=8)
    assert steps.parameter_bytes / 1e9 == pytest.approx(2.306, abs=5e-4)


def test_rescorer_in_the_formula_of_the_paper():
    """2 · 61e6 bytes and 2 · 12 · 1536 · 2 = 73,728 a token of the cache, per pass."""
    plain = printed_cost(2, 100, drafts=1)
    once = printed_cost(2, 100, drafts=1, passes=1)
    twice = printed_cost(2, 100, drafts=1, passes=2)
    assert once.parameter_bytes - plain.parameter_bytes == 61e6
    assert once.kv_bytes - plain.kv_bytes == 73_728 * 109 / 2
    assert twice.parameter_bytes - plain.parameter_bytes == 2 * 61e6
    assert twice.kv_bytes - plain.kv_bytes == 73_728 * 209 / 2
    rescorer_flops = 2 * 61e6 + 8 * 12 * 384 * 109**2
    assert once.flops - plain.flops == rescorer_flops / 2
    assert twice.flops - plain.flops == rescorer_flops


def test_paper_counts_keys_and_values_eight_times():
    """By hand 2 · 18 · 1536 · 2 bytes a token: 0.0142 … 0.2265 GB."""
    model, _ = paper_sizes()
    for context, expected in zip(
        CONTEXTS, (0.0142, 0.0566, 0.1132, 0.2265), strict=True
    ):
        kv_bytes = model.kv_bytes * context
        assert kv_bytes / 1e9 == pytest.approx(expected, abs=5e-5)
        assert printed_cost(1, context).kv_bytes == 8 * kv_bytes


def test_sizes_of_the_paper():
    model, rescorer = paper_sizes()
    assert model.trunk_parameters + model.head_parameters == pytest.approx(
        1.572e9, rel=0.01
    )
    assert rescorer.trunk_parameters == 62_654_592
