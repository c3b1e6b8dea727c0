"""The kernel of attention: the bits of single tokens, visible slots, threads."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.cpu import ordered_functions
from bpd_jax.cpu.attention_kernel import cache_dtype, ordered_attention
from bpd_jax.cpu.ordered_functions import KernelAttention
from bpd_jax.models.attention import attention, near
from bpd_jax.models.cache import BITS, KVCache, numbers
from bpd_jax.models.device_ops import Before, Operations
from bpd_jax.models.prefix_attention import of_mask

pytestmark = pytest.mark.usefixtures("instructions")


def tree_mask(rng, batch, length):
    """Random trees: a node sees itself and its ancestors."""
    mask = np.zeros((batch, length, length), bool)
    for b in range(batch):
        for t in range(length):
            parent = int(rng.integers(-1, t)) if t else -1
            mask[b, t, t] = True
            if parent >= 0:
                mask[b, t] |= mask[b, parent]
    return mask


# Batch, tokens, heads, heads of keys, features, slots, cap and window.
SIZES = [
    (2, 9, 4, 2, 32, 130, None, None),
    (1, 1, 3, 3, 64, 40, None, None),
    (1, 7, 4, 2, 32, 100, 3.0, None),
    (2, 6, 2, 1, 16, 60, None, 9),
]


@pytest.mark.parametrize(
    "sizes, dtype",
    [
        *((sizes, "float32") for sizes in SIZES),
        (SIZES[0], BITS),
        (SIZES[0], "bfloat16"),
        *(pytest.param(x, BITS, marks=pytest.mark.exhaustive) for x in SIZES[1:]),
    ],
)
def test_trees_give_the_bits_of_single_tokens(sizes, dtype):
    batch, length, heads, kv_heads, width, slots, softcap, window = sizes
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    queries = random(batch, length, heads, width)
    keys, values = random(2, batch, length, kv_heads, width)

    def stored(array):
        array = jnp.asarray(array)
        if dtype != BITS:
            return array.astype(dtype)
        return jax.lax.bitcast_convert_type(array.astype(jnp.bfloat16), BITS)

    def read(array):
        return numbers(array).astype(jnp.float32)

    cached = (
        stored(random(batch, kv_heads, width, slots)),
        stored(random(batch, kv_heads, slots, width)),
    )
    lengths = jnp.asarray(rng.integers(slots // 2, slots - 9, batch), jnp.int32)
    mask = tree_mask(rng, batch, length)
    depths = mask.sum(-1) - 1
    positions = jnp.asarray(lengths[:, None] + depths)
    first = None
    if window is not None:
        first = positions - window + 1
        mask &= np.asarray(near(positions, positions, window))
    attend = jax.jit(lambda *arrays: ordered_attention(*arrays, softcap))
    together = attend(queries, keys, values, jnp.asarray(mask), *cached, lengths, first)

    def prefix(folded):
        group = folded.shape[2] // length
        seen = (jnp.arange(slots) < lengths[:, None])[:, None]
        if first is not None:
            seen = seen & (jnp.arange(slots) >= first[:, :, None])
            seen = jnp.repeat(seen, group, axis=1)
        return of_mask(folded, *map(read, cached), seen, softcap)

    new = [read(stored(array)) for array in (keys, values)]
    other = attention(queries, *new, jnp.asarray(mask), prefix, softcap)
    np.testing.assert_allclose(together, other, atol=2e-6)

    extended = [
        np.concatenate([array, np.zeros_like(array)], axis=axis)
        for array, axis in zip(cached, (3, 2), strict=True)
    ]
    for b in range(batch):
        for t in range(length):
            ancestors = [u for u in range(t) if mask[b, t, u]]
            # Before those that a window hides, all ancestors are in the cache.
            if len(ancestors) < depths[b, t]:
                continue
            n = int(lengths[b])
            own_keys, own_values = (array[b : b + 1].copy() for array in extended)
            for i, u in enumerate(ancestors):
                own_keys[0, :, :, n + i] = stored(keys[b, u])
                own_values[0, :, n + i] = stored(values[b, u])
            at = slice(b, b + 1), slice(t, t + 1)
            alone = attend(
                *(array[at] for array in (queries, keys, values)),
                jnp.ones((1, 1, 1), bool),
                *(own_keys, own_values, jnp.asarray([n + len(ancestors)], jnp.int32)),
                None if first is None else first[at],
            )
            np.testing.assert_array_equal(alone[0, 0], together[b, t])


def test_drafts_side_by_side_do_not_see_each_other():
    rng = np.random.default_rng(1)
    queries, keys, values = jnp.asarray(rng.normal(size=(3, 1, 6, 2, 16)), jnp.float32)
    cached = jnp.zeros((1, 2, 16, 8)), jnp.zeros((1, 2, 8, 16))
    lengths = jnp.zeros((1,), jnp.int32)
    chains = jnp.broadcast_to(jnp.tril(jnp.ones((3, 3), bool)), (1, 2, 3, 3))
    both = ordered_attention(queries, keys, values, chains, *cached, lengths)
    for part in (slice(3), slice(3, 6)):
        arrays = (array[:, part] for array in (queries, keys, values))
        alone = ordered_attention(*arrays, chains[:, 0], *cached, lengths)
        np.testing.assert_array_equal(both[:, part], alone)


def inputs(batch=2, tokens=3, heads=2, width=16, slots=40, seed=0):
    """Queries, keys and values of a chain, and those of the cache."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    queries, keys, values = (normal(batch, tokens, heads, width) for _ in range(3))
    chain = jnp.tril(jnp.ones((tokens, tokens), bool))
    mask = jnp.broadcast_to(chain, (batch, tokens, tokens))
    cached = normal(batch, heads, width, slots), normal(batch, heads, slots, width)
    return queries, keys, values, mask, *cached


def test_threads_that_need_a_new_kernel_compile_it_once(monkeypatch):
    """A second engine would free the code of the one that XLA calls."""
    from bpd_jax.cpu import attention_kernel_code, xla_kernel

    monkeypatch.setattr(xla_kernel, "read_kept", lambda kind, key: None)
    monkeypatch.setattr(xla_kernel, "write_kept", lambda kind, key, content: None)
    built, build = [], attention_kernel_code.attention_module

    def counted(*sizes):
        built.append(sizes)
        return build(*sizes)

    monkeypatch.setattr(attention_kernel_code, "attention_module", counted)
    arrays = *inputs(width=80), jnp.array([1, 2])

    def trace(_):
        return jax.eval_shape(lambda *x: ordered_attention(*x), *arrays)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(trace, range(2)))
    assert len(built) == 1


def test_slots_past_the_length_are_not_read():
    *new, keys, values = inputs()
    lengths = jnp.array([17, 0], jnp.int32)
    hidden = jnp.arange(40) >= 17
    with_nans = (
        jnp.where(hidden, jnp.nan, keys),
        jnp.where(hidden[:, None], jnp.nan, values),
    )
    np.testing.assert_array_equal(
        ordered_attention(*new, *with_nans, lengths),
        ordered_attention(*new, keys, values, lengths),
    )
    # A length past the end, as of a ring of slots, means all of them.
    full, excess = (
        ordered_attention(*new, keys, values, jnp.array(some, jnp.int32))
        for some in ([40, 40], [99, 41])
    )
    np.testing.assert_array_equal(excess, full)


def test_extreme_scores():
    """Scores far below the maximum have no weight; NaNs are propagated."""
    queries = jnp.full((1, 1, 1, 16), 40.0)
    mask, lengths = jnp.ones((1, 1, 1), bool), jnp.array([3], jnp.int32)
    new = queries, jnp.full((1, 1, 1, 16), -1e30), jnp.full((1, 1, 1, 16), 7.0), mask
    keys = jnp.zeros((1, 1, 16, 3)).at[..., 0].set(1.0).at[..., 2].set(-1e30)
    values = jnp.arange(3.0)[None, None, :, None] * jnp.ones(16)
    mixed = ordered_attention(*new, keys, values, lengths)
    np.testing.assert_allclose(mixed, jnp.zeros((1, 1, 1, 16)), atol=1e-30)
    broken = ordered_attention(*new, keys.at[..., 0].set(jnp.nan), values, lengths)
    assert np.isnan(broken).all()


def test_caches_without_a_kernel_are_left_to_xla(monkeypatch):
    queries, keys, values, mask, *cached = inputs()
    lengths, calls = jnp.array([21, 0]), []

    def counted(*arguments):
        calls.append(arguments)
        return ordered_attention(*arguments)

    monkeypatch.setattr(ordered_functions, "ordered_attention", counted)

    def attend(operations, new, cached, lengths=lengths):
        cache = KVCache(*((array,) for array in cached), lengths)
        before = Before(cache, jnp.zeros((2, 3), jnp.int32))
        return operations.attention(*new, mask, before)

    new = queries, keys, values
    expected = attend(Operations(), new, cached)
    assert not calls
    np.testing.assert_allclose(
        attend(KernelAttention(), new, cached), expected, rtol=1e-5, atol=1e-5
    )
    assert len(calls) == 1
    halves = [array.astype("float16") for array in cached]
    narrow = [array[..., :9] for array in new]
    slim = [cached[0][:, :, :9], cached[1][..., :9]]
    seen = jnp.ones((2, 3, 40), bool)  # Lengths in training.
    for case in ((new, halves), (narrow, slim), (new, cached, seen)):
        attend(KernelAttention(), *case)
    assert len(calls) == 1
    assert cache_dtype("bfloat16", 16) == "uint16"
    assert cache_dtype("bfloat16", 9) == "float32"
    assert cache_dtype("float32", 16) is None
