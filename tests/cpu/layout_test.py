"""Parameters in the layout for decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.cpu.integer_kernel import TiledMatrix
from bpd_jax.cpu.layout import decoding_layout
from bpd_jax.models.products import SOFTMAX

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
    packed = decoding_layout(params)
    assert "scale" in packed["norm"]
    for name, rows in (
        ("query", query.reshape(6, 6).T),
        ("output", output.reshape(6, 6).T),
    ):
        kernel = packed["attention_0"][name]["kernel"]
        np.testing.assert_array_equal(kernel.rows, rows.astype(np.float32))


def test_layout_for_decoding_names_the_softmax():
    embedding = jnp.ones((7, 16))
    kernel = jnp.ones((16, 6))
    params = {"embedding": embedding, "mlp_0": {"input": {"kernel": kernel}}}
    layout = decoding_layout(params)
    np.testing.assert_array_equal(layout[SOFTMAX].rows, embedding)
    assert layout["mlp_0"]["input"]["kernel"].rows.shape == (6, 16)
    untied = decoding_layout({**params, "softmax": 2 * embedding})
    np.testing.assert_array_equal(untied[SOFTMAX].rows, 2 * embedding)
    # Ones are exact.
    assert layout["mlp_0"]["input"]["kernel"].rows.dtype == "bfloat16"
    precise = jnp.full((7, 16), 1.0).at[6, 3].set(0.1)
    layout = decoding_layout({**params, "embedding": precise})
    assert layout[SOFTMAX].rows.dtype == "float32"
    rounded = decoding_layout({**params, "embedding": precise}, exact=False)
    assert rounded[SOFTMAX].rows.dtype == "bfloat16"
    # The kernel does not read rows of 5 numbers, nor blocks of 32 in 16.
    short = decoding_layout({"embedding": jnp.ones((7, 5))}, exact=False)
    assert short[SOFTMAX].rows.dtype == "float32"
    repeated = decoding_layout(layout)
    assert jax.tree.structure(repeated) == jax.tree.structure(layout)


def test_matrices_of_drafters_are_rounded_except_in_layers():
    kernel = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    params = {
        "fusion": {"kernel": kernel},
        "mlp_0": {"input": {"kernel": kernel}},
        "softmax": kernel.T,
    }
    layout = decoding_layout(params, exact=False)
    for matrix in (layout["fusion"]["kernel"].rows, layout[SOFTMAX].rows):
        assert isinstance(matrix, TiledMatrix)
        values = matrix[np.arange(32)]
        np.testing.assert_allclose(values, kernel.T, atol=0.5 * abs(kernel).max() / 127)
    assert layout["mlp_0"]["input"]["kernel"].rows.dtype == "bfloat16"
    exact = decoding_layout(params)
    assert exact["fusion"]["kernel"].rows.dtype == "float32"
