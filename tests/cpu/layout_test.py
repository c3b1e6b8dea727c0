"""Parameters in the layout for decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.cpu.layout import decoding_layout
from bpd_jax.cpu.tiled_matrix import TiledMatrix
from bpd_jax.models.products import SOFTMAX
from bpd_jax.models.quantized import quantize

pytestmark = pytest.mark.usefixtures("instructions")


def test_kernels_are_transposed_over_their_summed_axes():
    rng = np.random.default_rng(0)
    query, output = rng.standard_normal((2, 6, 2, 3))
    output = output.reshape(2, 3, 6)
    params = {
        "attention_0": {"query": {"kernel": query}, "output": {"kernel": output}},
        "norm": {"scale": np.ones(6)},
        "embedding": jnp.ones((7, 6)),
    }
    packed = decoding_layout(params, "float32")
    assert "scale" in packed["norm"]
    for name, rows in (
        ("query", query.reshape(6, 6).T),
        ("output", output.reshape(6, 6).T),
    ):
        kernel = packed["attention_0"][name]["kernel"]
        np.testing.assert_array_equal(kernel.rows.values(), rows.astype(np.float32))


def test_layout_for_decoding_names_the_softmax():
    embedding = jnp.ones((7, 16))
    kernel = jnp.ones((16, 6))
    params = {"embedding": embedding, "mlp_0": {"input": {"kernel": kernel}}}
    layout = decoding_layout(params, "float32")
    np.testing.assert_array_equal(layout[SOFTMAX].rows.values(), embedding)
    # Lookups read the matrix of products.
    assert layout["embedding"] is layout[SOFTMAX].rows
    assert layout["mlp_0"]["input"]["kernel"].rows.shape == (6, 16)
    untied = decoding_layout({**params, "softmax": 2 * embedding}, "float32")
    np.testing.assert_array_equal(untied[SOFTMAX].rows.values(), 2 * embedding)
    np.testing.assert_array_equal(untied["embedding"], embedding)
    repeated = decoding_layout(layout, "float32")
    assert jax.tree.structure(repeated) == jax.tree.structure(layout)


def test_words_hold_two_numbers_where_that_is_allowed():
    ones = jnp.ones((7, 16))

    def bits(matrix, **options):
        layout = decoding_layout({"embedding": matrix}, "float32", **options)
        return layout[SOFTMAX].rows.storage.bits

    assert bits(ones) == 16
    precise = ones.at[6, 3].set(0.1)
    assert bits(precise) == 32
    assert bits(precise, exact=False) == 16
    # No row of words has 5 numbers of 16 bits.
    assert bits(jnp.ones((7, 5)), exact=False) == 32


@pytest.mark.parametrize("exact", [True, False])
def test_xla_multiplies_in_bfloat16(exact):
    kernel = np.ones((16, 6), np.float32)
    params = {"embedding": jnp.ones((7, 16)), "mlp_0": {"input": {"kernel": kernel}}}
    layout = decoding_layout(params, "bfloat16", exact=exact)
    for matrix in (layout["mlp_0"]["input"]["kernel"].rows, layout[SOFTMAX].rows):
        assert isinstance(matrix, jax.Array)
        assert matrix.dtype == "bfloat16"


def test_matrices_of_drafters_are_rounded_except_in_layers():
    kernel = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    params = {
        "fusion": {"kernel": kernel},
        "mlp_0": {"input": {"kernel": kernel}},
        "softmax": kernel.T,
    }
    layout = decoding_layout(params, "float32", exact=False)
    for matrix in (layout["fusion"]["kernel"].rows, layout[SOFTMAX].rows):
        assert isinstance(matrix, TiledMatrix)
        assert matrix.rounds_operands
        values = matrix[np.arange(32)]
        np.testing.assert_allclose(values, kernel.T, atol=0.5 * abs(kernel).max() / 127)
    assert layout["mlp_0"]["input"]["kernel"].rows.storage.bits == 16
    exact = decoding_layout(params, "float32")
    assert exact["fusion"]["kernel"].rows.storage.bits == 32


def test_a_drafter_reads_the_quantized_softmax_of_the_model():
    matrix = quantize(np.random.default_rng(0).standard_normal((40, 64)))
    model = decoding_layout({"embedding": matrix}, "float32")
    drafter = {"softmax": model["embedding"]}
    shared = decoding_layout(drafter, "float32", exact=False)[SOFTMAX].rows
    assert shared.rounds_operands
    assert shared.words is model["embedding"].words
    # Numbers of 16 bits are rounded.
    model = decoding_layout({"embedding": jnp.ones((40, 64))}, "float32")
    drafter = {"softmax": model["embedding"]}
    rounded = decoding_layout(drafter, "float32", exact=False)[SOFTMAX].rows
    assert rounded.rounds_operands
    assert rounded.storage.bits == 8
