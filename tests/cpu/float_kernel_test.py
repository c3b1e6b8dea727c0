"""The kernel for products in float32: exact sums, fixed order, concurrent calls."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.cpu.tiled_matrix import tiled, times_tiled
from tests.cpu.integer_kernel_test import STORAGES, quantized

pytestmark = pytest.mark.usefixtures("instructions")

multiply = jax.jit(times_tiled)

# The width of this processor, and of ARM.
WIDTHS = pytest.mark.parametrize("width", [None, 4], ids=["x86", "arm"])


def operands(rows, length, outputs, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((rows, length), (outputs, length))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


# Rows of one tile and of several; outputs of whole vectors and others; one chunk of the
# matrix and many; parts of K that do not fit into the cache, and no whole vectors.
SIZES = [
    (1, 16, 1),
    (9, 1537, 192),
    (17, 98, 2051),
    (40, 33, 3),
    (2, 40960, 9),
]


@WIDTHS
def test_products_equal_those_in_float64(width):
    """Also of matrices in bfloat16, which are multiplied in float32."""
    for rows, length, outputs in SIZES:
        x, matrix = operands(rows, length, outputs)
        exact = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64).T
        product = multiply(x, tiled(matrix, width))
        error = np.abs(product - exact).max()
        assert error <= 1e-6 * np.sqrt(length) * max(1.0, np.abs(exact).max())
        if length % 2 == 0:
            half = matrix.astype(jnp.bfloat16)
            same = multiply(x, tiled(half.astype(np.float32), width))
            np.testing.assert_array_equal(multiply(x, tiled(half, width)), same)


@WIDTHS
def test_results_do_not_depend_on_the_number_of_rows(width):
    x, matrix = operands(20, 576, 203)
    tiles = tiled(matrix, width)
    all_rows = np.asarray(multiply(x, tiles))
    for rows in (*range(1, 11), 19):
        np.testing.assert_array_equal(multiply(x[:rows], tiles), all_rows[:rows])
        np.testing.assert_array_equal(multiply(x[-rows:], tiles), all_rows[-rows:])


@WIDTHS
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_quantized_matrices_give_the_bits_of_their_values(storage, width):
    """In registers for few rows, expanded for more."""
    for rows, length, outputs in ((1, 32, 1), (9, 576, 77), (40, 1632, 203)):
        x, _ = operands(rows, length, 1)
        matrix = quantized(*storage, length, outputs)
        tiles, values = tiled(matrix, width), matrix.values()
        product = multiply(x, tiles)
        np.testing.assert_array_equal(product, multiply(x, tiled(values, width)))
        np.testing.assert_array_equal(multiply(x[:1], tiles), product[:1])
        np.testing.assert_array_equal(tiles.values(), values)


def test_rows_are_found_by_their_numbers():
    _, matrix = operands(1, 18, 37)
    ids = np.array([[0, 36], [18, 0]])
    for dtype in ("float32", "bfloat16"):
        stored = matrix.astype(dtype)
        tiles = tiled(stored)
        np.testing.assert_array_equal(tiles[ids], stored[ids])
        np.testing.assert_array_equal(tiles[3:5], stored[3:5])
        assert tiles.rows(ids[0]).dtype == dtype


def test_infinities_propagate_as_in_any_product():
    x, matrix = np.ones((2, 16), np.float32), np.zeros((3, 16), np.float32)
    matrix[1, 3] = np.inf
    tiles = tiled(matrix)
    np.testing.assert_array_equal(multiply(x, tiles), [[0, np.inf, 0]] * 2)
    np.testing.assert_array_equal(multiply(0 * x, tiles), [[0, np.nan, 0]] * 2)


def test_products_may_run_at_the_same_time():
    """More callers than threads: no call waits for one that has not started."""
    pairs = [operands(4, 576, 3000, seed) for seed in range(8)]
    pairs = [(jnp.asarray(x), tiled(matrix)) for x, matrix in pairs]
    expected = [np.asarray(multiply(*pair)) for pair in pairs]
    results = [[] for _ in pairs]

    def run(number):
        for _ in range(20):
            results[number].append(np.asarray(multiply(*pairs[number])))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    for values, value in zip(results, expected, strict=True):
        assert len(values) == 20
        for result in values:
            np.testing.assert_array_equal(result, value)


def test_sharded_operands_are_gathered():
    if jax.device_count() < 2:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((2,), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    x, matrix = operands(4, 64, 6)
    tiles = tiled(matrix)
    result = multiply(*jax.device_put((x, tiles), sharding))
    np.testing.assert_array_equal(result, multiply(x, tiles))
