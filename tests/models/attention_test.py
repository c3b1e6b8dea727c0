import numpy as np
import pytest

from bpd_jax.models.attention import attention, causal_mask


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

    got = attention(queries, keys, values, mask, prefix[0], prefix[1], lengths)

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


def test_causal_mask_keeps_segments_apart():
    mask = np.asarray(causal_mask(np.array([[1, 1, 2, 0]])))[0]
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]
