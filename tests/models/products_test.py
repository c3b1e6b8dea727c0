"""Products in bfloat16 that accumulate in float32; others are unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.products import (
    TRANSPOSED,
    product,
    times_rows,
    transposed_kernels,
    transposed_product,
)


def random(*shape, dtype):
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    return jnp.asarray(values).astype(dtype)


@pytest.mark.parametrize("axes, shape", [(1, (64, 3, 5)), (2, (8, 8, 7))])
def test_bfloat16_products_are_rounded_once(axes, shape):
    x = random(2, 3, *shape[:axes], dtype="bfloat16")
    kernel = random(*shape, dtype="bfloat16")
    exact = np.tensordot(*(np.asarray(v, np.float64) for v in (x, kernel)), axes)
    rounded = jnp.asarray(exact).astype("bfloat16")
    result = product(x, kernel, axes, "bfloat16")
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result, rounded)
    matrix = jnp.asarray(kernel.reshape(64, -1).T)
    flat = transposed_product(x, matrix, axes, "bfloat16")
    np.testing.assert_array_equal(flat.reshape(rounded.shape), rounded)


def test_float32_products_are_unchanged():
    x, kernel = random(2, 3, 16, dtype="float32"), random(16, 5, dtype="float32")
    np.testing.assert_array_equal(
        product(x, kernel, 1, "float32"), jnp.tensordot(x, kernel, 1)
    )
    np.testing.assert_array_equal(
        times_rows(x, kernel.T, "float32"), jnp.einsum("...D,VD->...V", x, kernel.T)
    )


def test_gradients_of_float32_kernels_have_no_float32_products():
    """A gradient in bfloat16 of a float32 kernel has no float32 product in it."""
    x, kernel = random(2, 16, dtype="bfloat16"), random(16, 5, dtype="float32")
    jaxpr = jax.make_jaxpr(jax.grad(lambda k: product(x, k, 1, "bfloat16").sum()))
    assert "preferred_element_type=float32" not in str(jaxpr(kernel))


def test_kernels_are_transposed_over_their_summed_axes():
    params = {
        "attention_0": {
            "query": {"kernel": random(6, 2, 3, dtype="bfloat16")},
            "output": {"kernel": random(2, 3, 6, dtype="bfloat16")},
        },
        "norm": {"scale": random(6, dtype="float32")},
    }
    transposed = transposed_kernels(params)
    assert transposed["norm"] is params["norm"] or "scale" in transposed["norm"]
    assert transposed["attention_0"]["query"][TRANSPOSED].shape == (6, 6)
    output = params["attention_0"]["output"]["kernel"]
    np.testing.assert_array_equal(
        transposed["attention_0"]["output"][TRANSPOSED], output.reshape(6, 6).T
    )
