"""The state before the first step, with parameters that were trained before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.layers import is_stacked, unstack_layers
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.transformer_config import ComputeConfig
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.state import (
    abstract_state,
    bytes_per_device,
    decays,
    init_state,
    learning_rate_schedule,
    make_optimizer,
    state_bytes,
    with_parameters,
)


def make_state(model, mesh, compute=None):
    compute = compute or ComputeConfig()
    optimizer = make_optimizer(OptimizerConfig(1e-3), 10)
    abstract = abstract_state(model, optimizer, mesh, compute)
    return init_state(model, optimizer, abstract, 0, compute)


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_given_parameters_replace_those_of_the_state(model, params, one_device):
    original = jax.tree.map(np.array, params)
    state = make_state(model, one_device)
    with_trunk = with_parameters(state, {"trunk": params["trunk"]})
    assert_equal(with_trunk.params["trunk"], params["trunk"])
    assert_equal(with_trunk.params["heads"], state.params["heads"])
    with_all = with_parameters(
        state, {"trunk": params["trunk"], "heads": params["heads"]}
    )
    assert_equal(with_all.params, params)
    assert with_all.step == 0
    # Donating the state does not delete the given parameters.
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(with_all)
    assert_equal(params, original)


def test_given_parameters_are_cast_and_stacked(model, params, one_device):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    state = make_state(model, one_device, ComputeConfig(scan_layers=True))
    updated = with_parameters(state, dict(half)).params
    assert is_stacked(updated["trunk"])
    updated = {**updated, "trunk": unstack_layers(updated["trunk"])}
    assert {leaf.dtype for leaf in jax.tree.leaves(updated)} == {jnp.dtype("float32")}
    assert_equal(updated, jax.tree.map(lambda x: x.astype(jnp.float32), half))


def test_bytes_per_device_of_a_sharded_state(model):
    optimizer = make_optimizer(OptimizerConfig(1e-2), 10)
    abstract = abstract_state(model, optimizer, make_mesh(MeshConfig(2, 2, 2)))
    parameters = sum(x.size for x in jax.tree.leaves(abstract.params))
    # Each parameter has two moments; a few counters come on top.
    assert 0 <= state_bytes(abstract) - 3 * 4 * parameters <= 32
    # Nearly all arrays are sharded four ways, norms two ways, positions not at all.
    share = bytes_per_device(abstract) / state_bytes(abstract)
    assert 1 / 4 < share < 1 / 2
    replicated = abstract_state(model, optimizer, make_mesh(MeshConfig(data=8)))
    assert bytes_per_device(replicated) == state_bytes(replicated)


@pytest.mark.parametrize(
    "steps, settings, expected",
    [
        (14, {"warmup_steps": 4}, {0: 0.25, 2: 0.75, 4: 1, 9: 0.55, 14: 0.1}),
        (14, {"warmup_steps": 4 / 14}, {0: 0.25, 2: 0.75, 4: 1, 9: 0.55, 14: 0.1}),
        (10, {"schedule": "linear"}, {0: 1, 5: 0.55, 10: 0.1}),
        (5, {"schedule": "constant"}, {0: 1, 5: 1}),
    ],
)
def test_learning_rates(steps, settings, expected):
    config = OptimizerConfig(1.0, final_fraction=0.1, **settings)
    schedule = learning_rate_schedule(config, steps)
    assert {step: schedule(step) for step in expected} == pytest.approx(expected)


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
