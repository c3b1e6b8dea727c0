import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.rotary import RotaryConfig, rotate

CONFIGS = {
    "plain": RotaryConfig(100.0),
    "half": RotaryConfig(100.0, fraction=0.5),
    "linear": RotaryConfig(100.0, 1.0, "linear", 4.0),
    "llama3": RotaryConfig(100.0, 1.0, "llama3", 8.0, 16),
    "yarn": RotaryConfig(100.0, 1.0, "yarn", 4.0, 16, beta_fast=4.0),
}


def random(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_scores_depend_on_distances_alone(config):
    queries, keys = random(1, 6, 2, 16), random(1, 6, 2, 16, seed=1)
    positions = jnp.array([[0, 1, 2, 5, 9, 30]])

    def scores(shift):
        q, k = (rotate(x, positions + shift, config) for x in (queries, keys))
        return jnp.einsum("BTNH,BUNH->BNTU", q, k)

    np.testing.assert_allclose(scores(0), scores(17), atol=2e-4)
    plain = jnp.einsum("BTNH,BUNH->BNTU", queries, keys)
    assert np.abs(scores(0) - plain).max() > 0.5
    # At distance 0 scores are not changed, except that yarn scales them.
    num_rotated = config.num_rotated(16)
    unrotated = jnp.einsum("BTNH,BTNH->BNT", queries, keys)
    expected = unrotated + (config.amplitude**2 - 1) * jnp.einsum(
        "BTNH,BTNH->BNT", queries[..., :num_rotated], keys[..., :num_rotated]
    )
    np.testing.assert_allclose(
        jnp.diagonal(scores(3), axis1=2, axis2=3), expected, atol=1e-4
    )


def test_pairs_are_halves_of_a_head():
    """Features 0 and 2 are rotated by one radian per token, 1 and 3 by 0.1."""
    x = jnp.array([1.0, 0, 0, 0, 0, 1, 0, 0]).reshape(1, 2, 1, 4)
    got = rotate(x, jnp.array([[2, 3]]), RotaryConfig(100.0))[0, :, 0]
    np.testing.assert_allclose(got[0], [np.cos(2), 0, np.sin(2), 0], atol=1e-6)
    np.testing.assert_allclose(got[1], [0, np.cos(0.3), 0, np.sin(0.3)], atol=1e-6)


def test_only_a_fraction_of_features_is_rotated():
    x = random(1, 3, 1, 8)
    got = rotate(x, jnp.array([[1, 2, 3]]), RotaryConfig(fraction=0.5))
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
    rotated = rotate(x[..., :4], jnp.array([[1, 2, 3]]), RotaryConfig())
    np.testing.assert_allclose(got[..., :4], rotated, atol=1e-6)


def test_bfloat16_angles_are_exact():
    """Position 4001 is not exact in bfloat16: angles are computed in float32."""
    x = random(1, 1, 1, 8)
    exact = rotate(x, jnp.array([[4001]]), RotaryConfig())
    got = rotate(x.astype(jnp.bfloat16), jnp.array([[4001]]), RotaryConfig())
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), exact, atol=0.02)
