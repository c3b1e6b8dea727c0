"""The kernel for products of few rows: exact sums, fixed order, concurrent calls."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.cpu import row_kernel
from bpd_jax.cpu.products import times_packed
from bpd_jax.cpu.tile import Tile
from tests.cpu.integer_kernel_test import STORAGES, quantized

pytestmark = pytest.mark.usefixtures("instructions")

multiply = jax.jit(row_kernel.rows_times_matrix)

ARM = Tile(4, 4, 4)


def operands(rows, length, outputs, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((rows, length), (outputs, length))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


# Full tiles and remainders of rows and outputs; one chunk, many, and rows of a matrix
# that are longer than a chunk.
SIZES = [
    (1, 16, 1),
    (6, 576, 192),
    (8, 1536, 577),
    (17, 96, 2051),
    (48, 32, 3),
    (2, 40960, 9),
]


@pytest.mark.parametrize("tile", [None, ARM], ids=["x86", "arm"])
def test_products_equal_those_in_float64(tile):
    """Also of matrices in bfloat16, which are multiplied in float32."""
    multiply = jax.jit(functools.partial(row_kernel.rows_times_matrix, tile=tile))
    for rows, length, outputs in SIZES:
        x, matrix = operands(rows, length, outputs)
        exact = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64).T
        product = multiply(x, matrix)
        error = np.abs(product - exact).max()
        assert error <= 1e-6 * np.sqrt(length) * max(1.0, np.abs(exact).max())
        np.testing.assert_array_equal(multiply(x[-1:], matrix), product[-1:])
        half = matrix.astype("bfloat16")
        same = multiply(x, half.astype("float32"))
        np.testing.assert_array_equal(multiply(x, half), same)


def test_results_do_not_depend_on_the_number_of_rows():
    x, matrix = operands(20, 576, 2053)
    all_rows = np.asarray(multiply(x, matrix))
    for rows in (1, 2, 5, 6, 7, 12, 19):
        np.testing.assert_array_equal(multiply(x[:rows], matrix), all_rows[:rows])
        np.testing.assert_array_equal(multiply(x[-rows:], matrix), all_rows[-rows:])


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_quantized_matrices_give_the_bits_of_their_values(storage):
    """In registers for one tile of rows, expanded for more; remainders of outputs."""
    # Each kernel takes a second to compile: ARM's tile reads one storage.
    for tile in (None, ARM) if storage[0] == 4 else (None,):
        for rows, length, outputs in ((1, 32, 1), (6, 576, 577), (40, 96, 2051)):
            x, _ = operands(rows, length, 1)
            matrix = quantized(*storage, length, outputs)
            product = row_kernel.rows_times_matrix(x, matrix, tile)
            same = row_kernel.rows_times_matrix(x, matrix.values(), tile)
            np.testing.assert_array_equal(product, same)
            written = row_kernel.expanded(matrix, tile)
            np.testing.assert_array_equal(written, matrix.values())


def test_infinities_propagate_as_in_any_product():
    x, matrix = jnp.ones((2, 16)), jnp.zeros((3, 16)).at[1, 3].set(jnp.inf)
    np.testing.assert_array_equal(multiply(x, matrix), [[0, np.inf, 0]] * 2)
    np.testing.assert_array_equal(multiply(0 * x, matrix), [[0, np.nan, 0]] * 2)


def test_products_may_run_at_the_same_time():
    """More callers than threads: no call waits for one that has not started."""
    pairs = [operands(4, 576, 3000, seed) for seed in range(8)]
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


def test_other_products_are_left_to_xla():
    x, matrix = operands(2, 64, 5)
    for stored in (matrix, matrix.astype("bfloat16")):
        assert row_kernel.applies(x, stored)
        most = row_kernel.MOST_ROWS[stored.dtype]
        assert row_kernel.applies(jnp.ones((most, 64)), stored)
        assert not row_kernel.applies(jnp.ones((most + 1, 64)), stored)
    for block in (16, 32, 64):
        stored = quantized(8, block, "", 64, 5)
        assert row_kernel.applies(x, stored) == (block < 64)
    assert not row_kernel.applies(x, matrix.astype("float16"))
    assert not row_kernel.applies(x[:, :-1], matrix[:, :-1])
    assert not row_kernel.applies(x.astype("bfloat16"), matrix)
    many_rows = jnp.ones((2, 120, 64))
    np.testing.assert_allclose(
        times_packed(many_rows, matrix, "float32"), many_rows @ matrix.T, rtol=1e-5
    )
    few_rows = x.reshape(1, 2, 64)
    np.testing.assert_array_equal(
        times_packed(few_rows, matrix, "float32")[0], multiply(x, matrix)
    )


def test_sharded_operands_are_gathered():
    if jax.device_count() < 2:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((2,), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    x, matrix = operands(4, 64, 6)
    result = jax.jit(row_kernel.rows_times_matrix)(
        jax.device_put(x, sharding), jax.device_put(matrix, sharding)
    )
    np.testing.assert_array_equal(result, multiply(x, matrix))
