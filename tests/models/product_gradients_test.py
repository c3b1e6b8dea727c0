"""Products of bfloat16 matrices, and the products in their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.products import float32_sums, product


def operands(dtype="bfloat16"):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(0, 1, (3, 5, 4, 6)), dtype)
    kernel = jnp.asarray(rng.normal(0, 1, (4, 6, 7)), dtype)
    return x, kernel


def weighted(x, kernel, axes):
    with float32_sums():
        y = product(x, kernel, axes, x.dtype.name)
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(weights * y)


@pytest.mark.parametrize("axes", [1, 2])
def test_products_and_gradients_are_those_of_float32_rounded(axes):
    x, kernel = operands()
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
    traced = jax.make_jaxpr(jax.grad(weighted, (0, 1)), static_argnums=2)(
        *operands(), 2
    )
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


def test_float32_products_are_unchanged():
    x, kernel = operands("float32")
    with float32_sums():
        result = product(x, kernel, 2, "float32")
    np.testing.assert_array_equal(result, jnp.tensordot(x, kernel, axes=2))
