"""Attention against definitions; `tests/formats/huggingface_test` has rotations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models import attention as module
from bpd_jax.models.prefix_attention import prefix_attention
from bpd_jax.models.rotary import RotaryConfig, rotate


# As a whole: operation by operation it would be compiled for every shape.
@jax.jit
def attention(queries, keys, values, mask, *cache):
    prefix = None
    if cache:
        positions = jnp.zeros(queries.shape[:2], jnp.int32)
        prefix = functools.partial(
            prefix_attention,
            **dict(zip(("keys", "values", "visible"), cache, strict=False)),
            positions=positions,
        )
    return module.attention(queries, keys, values, mask, prefix)


def naive(queries, keys, values, visible):
    """Attention of one query head at a time, in float64."""
    batch, length, heads, width = queries.shape
    group = heads // keys.shape[2]
    out = np.zeros(queries.shape)
    for b in range(batch):
        for n in range(heads):
            k, v = keys[b, :, n // group], values[b, :, n // group]
            for t in range(length):
                seen = visible[b, t]
                scores = k[seen] @ queries[b, t, n] / np.sqrt(width)
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ v[seen] / weights.sum()
    return out


def as_cached(prefix):
    """Keys and values [2, B, S, K, H] as the cache lays them out."""
    return prefix[0].transpose(0, 2, 3, 1), prefix[1].swapaxes(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_over_prefix_and_tree_equals_naive(kv_heads):
    rng = np.random.default_rng(0)
    shape = (2, 5, kv_heads, 3)
    queries = rng.normal(size=(2, 5, 4, 3)).astype(np.float32)
    keys, values = rng.normal(size=(2, *shape)).astype(np.float32)
    prefix = rng.normal(size=(2, 2, 7, kv_heads, 3)).astype(np.float32)
    lengths = np.array([7, 2])
    mask = rng.random((2, 5, 5)) < 0.5
    mask |= np.eye(5, dtype=bool)

    got = attention(queries, keys, values, mask, *as_cached(prefix), lengths)

    seen = np.arange(7) < lengths[:, None]
    visible = np.concatenate([np.repeat(seen[:, None], 5, 1), mask], axis=2)
    want = naive(
        queries,
        np.concatenate([prefix[0], keys], axis=1),
        np.concatenate([prefix[1], values], axis=1),
        visible,
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    # Without a prefix the same mask alone decides.
    got = attention(queries, keys, values, mask)
    np.testing.assert_allclose(
        got, naive(queries, keys, values, mask), rtol=1e-5, atol=1e-5
    )


def random_inputs(rng, length, kv_heads=2, keys=None):
    keys = keys or length
    queries = rng.normal(size=(2, length, 4, 3)).astype(np.float32)
    new = rng.normal(size=(2, 2, keys, kv_heads, 3)).astype(np.float32)
    prefix = as_cached(rng.normal(size=(2, 2, 7, kv_heads, 3)).astype(np.float32))
    return queries, new[0], new[1], prefix, np.array([7, 2])


@pytest.mark.parametrize("kv_heads, cached", [(4, False), (2, True)])
def test_groups_equal_blocks_on_the_diagonal(kv_heads, cached):
    rng = np.random.default_rng(1)
    queries, keys, values, prefix, lengths = random_inputs(rng, 6, kv_heads)
    groups = rng.random((2, 3, 2, 2)) < 0.5
    groups |= np.eye(2, dtype=bool)
    blocks = np.zeros((2, 6, 6), bool)
    for g in range(3):
        blocks[:, 2 * g : 2 * g + 2, 2 * g : 2 * g + 2] = groups[:, g]

    cache = (*prefix, lengths) if cached else ()
    got = attention(queries, keys, values, groups, *cache)
    want = attention(queries, keys, values, blocks, *cache)

    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_gradients_equal_those_of_a_softmax_written_out():
    rng = np.random.default_rng(3)
    queries, keys, values, _, _ = random_inputs(rng, 5, kv_heads=4)
    mask = np.tril(np.ones((5, 5), bool))
    weights = rng.normal(size=queries.shape)

    def by_attention(*arrays):
        return (attention(*arrays, np.stack([mask] * 2)) * weights).sum()

    def written_out(queries, keys, values):
        scores = jnp.einsum("btnh,bunh->bntu", queries, keys) / np.sqrt(3)
        probs = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        return (jnp.einsum("bntu,bunh->btnh", probs, values) * weights).sum()

    got = jax.jit(jax.grad(by_attention, (0, 1, 2)))(queries, keys, values)
    want = jax.jit(jax.grad(written_out, (0, 1, 2)))(queries, keys, values)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_bfloat16_angles_are_exact():
    """Position 4001 is not exact in bfloat16: angles are computed in float32."""
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, 8))
    exact = rotate(x, jnp.array([[4001]]), RotaryConfig())
    got = rotate(x.astype(jnp.bfloat16), jnp.array([[4001]]), RotaryConfig())
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), exact, atol=0.02)
