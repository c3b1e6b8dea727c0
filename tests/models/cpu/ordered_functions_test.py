"""Attention, norms and activations have the same bits however tokens are passed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.attention import attention, near
from bpd_jax.models.cache import BITS, numbers
from bpd_jax.models.cpu import index_of_largest, largest
from bpd_jax.models.cpu.ordered_functions import (
    ordered_attention,
    row_activation,
    row_norm,
)
from bpd_jax.models.cpu.tile import Tile, tile_of_processor
from bpd_jax.models.layers import ACTIVATIONS
from bpd_jax.models.prefix_attention import of_mask

pytestmark = pytest.mark.skipif(
    tile_of_processor() is None, reason="no kernel for this processor"
)


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
AVX2 = Tile(8, 2, 4)


@pytest.mark.parametrize(
    "sizes, tile, dtype",
    [
        *((sizes, None, "float32") for sizes in SIZES),
        (SIZES[0], AVX2, "float32"),
        (SIZES[0], None, BITS),
        (SIZES[0], AVX2, BITS),
        *(
            pytest.param(sizes, tile, dtype, marks=pytest.mark.exhaustive)
            for sizes in SIZES[1:]
            for tile, dtype in ((AVX2, "float32"), (None, BITS))
        ),
    ],
)
def test_trees_give_the_bits_of_single_tokens(sizes, tile, dtype):
    batch, length, heads, kv_heads, width, slots, softcap, window = sizes
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    queries = random(batch, length, heads, width)
    keys, values = random(2, batch, length, kv_heads, width)

    def stored(array):
        array = jnp.asarray(array)
        if dtype != BITS:
            return array
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
    attend = jax.jit(lambda *arrays: ordered_attention(*arrays, softcap, tile))
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


def rows(count, *widths, seed=0):
    shape = (count, *widths)
    return 4 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("centred", [False, True])
def test_norms_are_those_of_flax(centred):
    x, scale, bias = rows(70, 576), rows(576, seed=1), rows(576, seed=2)
    if centred:
        expected = nn.LayerNorm(1e-3).apply(
            {"params": {"scale": scale, "bias": bias}}, x
        )
    else:
        bias = None
        expected = nn.RMSNorm(1e-3).apply({"params": {"scale": scale}}, x)
    norm = row_norm(x, scale, bias, 1e-3, centred=centred)
    np.testing.assert_allclose(norm, expected, atol=1e-5, rtol=1e-5)
    alone = row_norm(x[3:4], scale, bias, 1e-3, centred=centred)
    np.testing.assert_array_equal(alone, norm[3:4])


def test_norms_over_two_axes():
    x, scale = rows(2, 3, 4, 16), rows(4, 16, seed=1)
    norm = row_norm(x, scale, None, 1e-6, centred=False)
    whole = row_norm(x.reshape(2, 3, 64), scale.ravel(), None, 1e-6, centred=False)
    np.testing.assert_array_equal(norm, whole.reshape(x.shape))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_those_of_jax(name):
    x, gate = rows(40, 1536), rows(40, 1536, seed=1)
    for factor in (None, gate):
        result = row_activation(name, x, factor)
        expected = ACTIVATIONS[name](x) * (1 if factor is None else factor)
        np.testing.assert_allclose(result, expected, atol=1e-5, rtol=1e-5)
        alone = row_activation(name, x[5:6], None if factor is None else factor[5:6])
        np.testing.assert_array_equal(alone, jax.numpy.asarray(result)[5:6])


@pytest.mark.parametrize("size", [1, 511, 512, 1700])
def test_index_of_largest_is_that_of_numpy(size):
    generator = np.random.default_rng(size)
    # Few different numbers, so that most rows have several largest ones.
    logits = generator.integers(-3, 3, (2, 3, size)).astype(np.float32)
    logits[0, 1] = -np.inf
    chosen = index_of_largest(jnp.asarray(logits))
    np.testing.assert_array_equal(chosen, logits.argmax(-1))
    assert chosen.dtype == jnp.int32


@pytest.mark.parametrize("size, count", [(300, 5), (640, 4), (1700, 16), (1700, 1)])
def test_largest_is_top_k(size, count):
    generator = np.random.default_rng(size)
    logits = generator.integers(-30, 30, (2, 3, size)).astype(np.float32)
    values, indices = largest(jnp.asarray(logits), count)
    expected = jax.lax.top_k(logits, count)
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(indices, expected[1])
