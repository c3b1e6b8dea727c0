"""The kernel for attention to the cache: exact sums, fixed order, visible slots."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.cache import BITS, KVCache
from bpd_jax.models.cpu import ordered_functions
from bpd_jax.models.cpu.attention_kernel import cache_dtype, prefix_attention
from bpd_jax.models.cpu.ordered_functions import KernelOperations
from bpd_jax.models.cpu.tile import Tile, tile_of_processor
from bpd_jax.models.operations import Before, Operations

pytestmark = pytest.mark.skipif(
    tile_of_processor() is None, reason="no kernel for this processor"
)


def inputs(batch, heads, rows, width, slots, dtype="float32", seed=0):
    """Queries, keys, values and lengths; the first row sees all, the last one none."""
    rng = np.random.default_rng(seed)
    shapes = (
        (batch, heads, rows, width),
        (batch, heads, width, slots),
        (batch, heads, slots, width),
    )
    queries, keys, values = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes
    )
    lengths = rng.integers(0, slots + 1, batch).astype(np.int32)
    lengths[-1], lengths[0] = 0, slots
    return queries, keys.astype(dtype), values.astype(dtype), jnp.asarray(lengths)


def exact(queries, keys, values, lengths):
    """Mixed values, peaks and totals in float64."""
    queries, keys, values = (
        np.asarray(array.astype(jnp.float32), np.float64)
        for array in (queries, keys, values)
    )
    visible = np.arange(keys.shape[-1]) < np.asarray(lengths)[:, None, None, None]
    scores = np.where(visible, queries @ keys, -np.inf)
    peaks = scores.max(-1)
    shifts = np.where(np.isinf(peaks), 0, peaks)[..., None]
    weights = np.exp(scores - shifts)
    return weights @ values, peaks, weights.sum(-1)


def assert_same(results, others):
    for one, other in zip(results, others, strict=True):
        np.testing.assert_array_equal(one, other)


# Full groups of slots and remainders, full tiles of queries and remainders, and heads
# whose features do not fill a group of vectors.
SIZES = [
    ((3, 3, 3, 64, 385), "float32"),
    ((4, 2, 7, 48, 64), "bfloat16"),
    ((2, 1, 13, 128, 77), "float32"),
    ((2, 2, 5, 16, 5), "bfloat16"),
]
TILES = {"this": None, "avx2": (8, 2, 4), "arm": (4, 4, 4)}


@pytest.mark.parametrize(
    "sizes, dtype, tile",
    [
        pytest.param(
            *case,
            tile,
            id=f"{'_'.join(map(str, case[0]))}-{name}",
            # Each of these cases compiles a kernel.
            marks=pytest.mark.exhaustive if tile and number > 1 else (),
        )
        for number, case in enumerate(SIZES)
        for name, tile in TILES.items()
    ],
)
def test_attention_equals_that_in_float64(sizes, dtype, tile):
    arrays = inputs(*sizes, dtype)
    results = prefix_attention(*arrays, tile and Tile(*tile))
    for result, expected in zip(results, exact(*arrays), strict=True):
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, expected, rtol=3e-5, atol=3e-5)


def test_results_do_not_depend_on_other_queries():
    queries, *context = inputs(2, 2, 20, 64, 150)
    all_queries = [np.asarray(array) for array in prefix_attention(queries, *context)]
    for rows in (1, 2, 5, 6, 7, 13):
        for rows_slice in (slice(rows), slice(-rows, None)):
            some_queries = prefix_attention(queries[:, :, rows_slice], *context)
            assert_same(some_queries, [x[:, :, rows_slice] for x in all_queries])


def test_threads_that_need_a_new_kernel_compile_it_once(monkeypatch):
    """A second engine would free the code of the one that XLA calls."""
    from bpd_jax.models.cpu import attention_kernel_code, xla_kernel

    monkeypatch.setattr(xla_kernel, "read_kept", lambda kind, key: None)
    monkeypatch.setattr(xla_kernel, "write_kept", lambda kind, key, content: None)
    built, build = [], attention_kernel_code.attention_module

    def counted(*sizes):
        built.append(sizes)
        return build(*sizes)

    monkeypatch.setattr(attention_kernel_code, "attention_module", counted)
    arrays = inputs(1, 1, 2, 80, 5)

    def trace(_):
        return jax.eval_shape(lambda *x: prefix_attention(*x), *arrays)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(trace, range(2)))
    assert len(built) == 1


def test_slots_past_the_length_are_not_read():
    queries, keys, values, _ = inputs(2, 1, 3, 16, 40)
    lengths = jnp.array([17, 0], jnp.int32)
    hidden = jnp.arange(40) >= 17
    with_nans = (
        jnp.where(hidden, jnp.nan, keys),
        jnp.where(hidden[:, None], jnp.nan, values),
    )
    without_nans = prefix_attention(queries, keys, values, lengths)
    assert_same(prefix_attention(queries, *with_nans, lengths), without_nans)
    # A length past the end, as of a ring of slots, means all of them.
    full_length, excess_length = (
        prefix_attention(queries, keys, values, jnp.array(lengths, jnp.int32))
        for lengths in ([40, 40], [99, 41])
    )
    assert_same(excess_length, full_length)


def test_extreme_scores():
    """Scores far below the maximum have no weight; NaNs are propagated."""
    queries = jnp.full((1, 1, 1, 16), 10.0)
    keys = jnp.zeros((1, 1, 16, 3)).at[..., 0].set(1.0).at[..., 2].set(-1e30)
    values = jnp.arange(3.0)[None, None, :, None] * jnp.ones(16)
    lengths = jnp.array([3], jnp.int32)
    mixed, peak, total = prefix_attention(queries, keys, values, lengths)
    assert float(peak[0, 0, 0]) == 160.0
    np.testing.assert_allclose(total, [[[1.0]]])
    np.testing.assert_allclose(mixed, jnp.zeros((1, 1, 1, 16)), atol=1e-30)
    broken = prefix_attention(queries, keys.at[..., 0].set(jnp.nan), values, lengths)
    assert np.isnan(broken[0]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bits"])
def test_attention_for_decoding_equals_that_by_xla(dtype, monkeypatch):
    rng = np.random.default_rng(1)
    queries, keys, values = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 3, 5, 16), (2, 3, 16, 21), (2, 3, 21, 16))
    )
    if dtype != "float32":
        keys, values = keys.astype(jnp.bfloat16), values.astype(jnp.bfloat16)
    lengths, positions = jnp.array([21, 0]), jnp.zeros((2, 5), jnp.int32)
    cached = keys.astype(jnp.float32), values.astype(jnp.float32)
    cache = KVCache(*((array,) for array in cached), lengths)
    expected = Operations().read(queries, Before(cache, positions))
    if dtype == "bits":
        keys, values = (
            jax.lax.bitcast_convert_type(array, BITS) for array in (keys, values)
        )
    calls = []

    def counted(*operands):
        calls.append(operands)
        return prefix_attention(*operands)

    monkeypatch.setattr(ordered_functions, "prefix_attention", counted)
    cache = KVCache((keys,), (values,), lengths)
    for operations, tolerance in ((KernelOperations(), 1e-5), (Operations(), 0.02)):
        # Without the kernel, XLA reads the same cache.
        result = operations.read(queries, Before(cache, positions))
        assert len(calls) == 1
        for got, want in zip(result, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_other_caches_are_left_to_xla():
    keys, values = jnp.ones((1, 1, 16, 3)), jnp.ones((1, 1, 3, 16))
    queries, lengths = jnp.ones((1, 1, 2, 16)), jnp.array([3])
    assert prefix_attention(queries, keys, values, lengths) is not None
    assert prefix_attention(queries, keys.astype("float16"), values, lengths) is None
    narrow = queries[..., :9], keys[:, :, :9], values[..., :9]
    assert prefix_attention(*narrow, lengths) is None
    assert cache_dtype("bfloat16", 16) == "uint16"
    assert cache_dtype("bfloat16", 9) == "float32"
    assert cache_dtype("float32", 16) is None
