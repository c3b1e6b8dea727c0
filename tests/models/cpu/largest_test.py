"""The largest numbers: by blocks, with the rules of argmax and top_k."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.cpu import index_of_largest, largest


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
