"""Norms and activations have the same bits however many tokens a pass has."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.cpu.largest import index_of_largest, largest
from bpd_jax.cpu.ordered_functions import row_activation, row_norm
from bpd_jax.models.layers import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("instructions")


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
