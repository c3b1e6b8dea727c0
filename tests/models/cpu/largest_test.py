"""The greedy choice: by blocks, with argmax's rules."""

import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.cpu import index_of_largest


@pytest.mark.parametrize("size", [1, 511, 512, 1700])
def test_index_of_largest_is_that_of_numpy(size):
    generator = np.random.default_rng(size)
    # Few different numbers, so that most rows have several largest ones.
    logits = generator.integers(-3, 3, (2, 3, size)).astype(np.float32)
    logits[0, 1] = -np.inf
    chosen = index_of_largest(jnp.asarray(logits))
    np.testing.assert_array_equal(chosen, logits.argmax(-1))
    assert chosen.dtype == jnp.int32
