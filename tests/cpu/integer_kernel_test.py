"""Integer products: sums of rounded numbers, for any number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.cpu.tiled_matrix import tiled, times_tiled
from bpd_jax.models.quantized import QuantizedMatrix, pack

pytestmark = pytest.mark.usefixtures("instructions")


def quantized(bits, block, kind, length, outputs):
    """A random matrix; its integers are negative too only if there are no minima.

    Its products of scales and integers are exact.
    """
    rng = np.random.default_rng(0)
    scales, minima = rng.normal(size=(2, outputs, length // block)).astype(np.float32)
    scales = scales.astype(np.float16).astype(np.float32)
    shape = outputs, length
    if bits == 4:
        integers = pack(rng.integers(0, 16, shape, np.uint8))
    elif kind == "minima":
        integers = rng.integers(0, 32, shape).astype(np.int8)
    else:
        integers = rng.integers(-128, 128, shape, np.int8)
    return QuantizedMatrix(integers, scales, minima if kind == "minima" else None)


def rounded(x, block):
    """Rows with 127 steps up to the largest number of each block."""
    blocks = x.reshape(len(x), -1, block)
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(127, largest, where=largest > 0, out=np.zeros_like(largest))
    steps = np.rint(blocks * inverse)
    return (steps.astype(np.float64) * (largest / 127)).reshape(x.shape)


# Storages of files: Q4, Q8_0 and Q5_0, Q5_1, Q6_K.
STORAGES = [(4, 32, "minima"), (8, 32, ""), (8, 32, "minima"), (8, 16, "")]


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_products_are_those_of_rounded_rows_alone_and_together(storage):
    multiply = jax.jit(times_tiled)
    # Tiles of rows and remainders; groups of outputs and remainders; several chunks.
    for rows, length, outputs in ((1, 32, 1), (6, 96, 37), (19, 576, 1203)):
        x = np.random.default_rng(1).normal(size=(rows, length)).astype(np.float32)
        x[0, :32] = 0
        matrix = quantized(*storage, length, outputs)
        tiles = tiled(matrix, rounds_operands=True)
        product = np.asarray(multiply(x, tiles))
        exact = rounded(x, storage[1]) @ np.asarray(matrix.values(), np.float64).T
        assert np.abs(product - exact).max() <= 1e-6 * np.abs(exact).max()
        np.testing.assert_array_equal(multiply(x[-1:], tiles), product[-1:])
        np.testing.assert_array_equal(multiply(x[:5], tiles), product[:5])
        ids = np.array([[0, outputs - 1], [outputs // 2, 0]])
        np.testing.assert_array_equal(tiles[ids], matrix.values()[ids])


def test_infinities_are_not_hidden():
    x = jnp.ones((1, 32)).at[0, 3].set(jnp.inf)
    matrix = quantized(8, 32, "", 32, 3)
    product = times_tiled(x, tiled(matrix, rounds_operands=True))
    assert not np.isfinite(product).any()
