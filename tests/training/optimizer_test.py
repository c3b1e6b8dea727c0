import jax
import numpy as np
import pytest

from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.optimizer import decays, learning_rate_schedule, make_optimizer


def rates(steps, **kwargs):
    schedule = learning_rate_schedule(OptimizerConfig(**kwargs), steps)
    return np.array([schedule(step) for step in range(steps + 1)])


@pytest.mark.parametrize("warmup", [4, 4 / 14])
def test_warmup_then_cosine(warmup):
    schedule = rates(14, learning_rate=1.0, warmup_steps=warmup, final_fraction=0.1)
    np.testing.assert_allclose(schedule[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(schedule[9], 0.55, rtol=1e-6)
    np.testing.assert_allclose(schedule[14], 0.1, rtol=1e-6)


def test_linear_and_constant():
    schedule = rates(10, learning_rate=2.0, schedule="linear", final_fraction=0.5)
    np.testing.assert_allclose(schedule, np.linspace(2, 1, 11), rtol=1e-6)
    assert (rates(5, learning_rate=2.0, schedule="constant") == 2).all()


def test_weight_decay_spares_biases_and_norms(params):
    marked = {
        jax.tree_util.keystr(path, simple=True, separator="/"): decayed
        for path, decayed in jax.tree_util.tree_leaves_with_path(decays(params))
    }
    assert marked["trunk/attention_0/query/kernel"]
    assert marked["trunk/embedding"]
    assert marked["heads/kernel_in"]
    assert not marked["trunk/attention_0/query/bias"]
    assert not marked["heads/bias_in"]
    assert not marked["trunk/final_norm/scale"]
    assert not marked["trunk/final_norm/bias"]


def test_clipping_bounds_the_gradients_of_the_moments():
    params = {"kernel": np.zeros(4, np.float32)}
    gradients = {"kernel": np.full(4, 50, np.float32)}
    moments = []
    for clip_norm in (1.0, None):
        config = OptimizerConfig(0.1, beta1=0.0, clip_norm=clip_norm)
        optimizer = make_optimizer(config, 10)
        _, state = optimizer.update(gradients, optimizer.init(params), params)
        moments.append(np.linalg.norm(find(state, "mu")["kernel"]))
    np.testing.assert_allclose(moments, [1, 100], rtol=1e-5)


def find(state, name):
    if hasattr(state, name):
        return getattr(state, name)
    matches = [find(part, name) for part in state if isinstance(part, tuple)]
    return next((part for part in matches if part is not None), None)


def test_trunk_and_heads_have_their_own_rates():
    kernel = {"kernel": np.ones(4, np.float32)}
    params = {"trunk": dict(kernel), "heads": dict(kernel)}
    config = OptimizerConfig(0.5, trunk_learning_rate=0.01, clip_norm=None)
    optimizer = make_optimizer(config, 10)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates["heads"]["kernel"], -0.5, rtol=1e-4)
    np.testing.assert_allclose(updates["trunk"]["kernel"], -0.01, rtol=1e-4)
