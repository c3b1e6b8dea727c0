"""Products in bfloat16 that accumulate in float32; others are unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.products import Packed, float32_sums, logits, product
from bpd_jax.models.quantized import quantize


def random(*shape, dtype="bfloat16", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values).astype(dtype)


@pytest.mark.parametrize("axes, shape", [(1, (64, 3, 5)), (2, (8, 8, 7))])
def test_bfloat16_products_are_rounded_once(axes, shape):
    x, kernel = random(2, 3, *shape[:axes]), random(*shape)
    exact = np.tensordot(*(np.asarray(v, np.float64) for v in (x, kernel)), axes)
    rounded = jnp.asarray(exact).astype("bfloat16")
    result = product(x, kernel, axes, "bfloat16")
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result, rounded)
    packed = Packed(jnp.asarray(kernel.reshape(64, -1).T), kernel.shape)
    flat = product(x, packed, axes, "bfloat16")
    np.testing.assert_array_equal(flat.reshape(rounded.shape), rounded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_with_quantized_matrices_are_those_with_their_values(dtype):
    matrix = quantize(np.asarray(random(40, 64, dtype="float32")))
    values = jnp.asarray(matrix.values(dtype))
    # Few rows, which a kernel may multiply, and many.
    for rows in (3, 200):
        x = random(rows, 64, dtype=dtype)
        for stored, same in (
            (product(x, Packed(matrix, (64, 40)), 1, dtype),
             product(x, Packed(values, (64, 40)), 1, dtype)),
            (logits({}, matrix, x, dtype), logits({}, values, x, dtype)),
        ):  # fmt: skip
            assert stored.dtype == same.dtype
            np.testing.assert_array_equal(stored, same)


def weighted(x, kernel, axes):
    with float32_sums():
        y = product(x, kernel, axes, x.dtype.name)
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(weights * y)


@pytest.mark.parametrize("axes", [1, 2])
def test_float32_sums_and_gradients_are_those_of_float32_rounded(axes):
    x, kernel = random(3, 5, 4, 6), random(4, 6, 7, seed=1)
    if axes == 1:
        x, kernel = x[:, :, 0], kernel[0]
    gradients = jax.grad(weighted, (0, 1))(x, kernel, axes)
    float32_operands = [array.astype(jnp.float32) for array in (x, kernel)]
    float32_gradients = jax.grad(weighted, (0, 1))(*float32_operands, axes)
    for gradient, float32_gradient in zip(gradients, float32_gradients, strict=True):
        assert gradient.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            gradient.astype(jnp.float32), float32_gradient, rtol=2e-2, atol=5e-2
        )
    with float32_sums():
        y = product(x, kernel, axes, x.dtype.name)
    exact = jnp.tensordot(*float32_operands, axes=axes)
    # The sum is rounded once: within half a unit of the last of 8 bits.
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-8)


def test_every_product_has_bfloat16_operands_and_float32_sums():
    gradients = jax.make_jaxpr(jax.grad(weighted, (0, 1)), static_argnums=2)
    traced = gradients(random(3, 5, 4, 6), random(4, 6, 7), 2)
    products = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                products.append(equation)
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(traced.jaxpr)
    assert len(products) == 3
    for equation in products:
        assert {v.aval.dtype for v in equation.invars} == {jnp.dtype("bfloat16")}
        assert equation.outvars[0].aval.dtype == jnp.float32
