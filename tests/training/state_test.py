"""The state before the first step, with parameters that were trained before."""

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.models.compute import ComputeConfig
from bpd_jax.models.stacking import is_stacked, unstack_layers
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.state import abstract_state, init_state, with_parameters


def make_state(model, mesh, compute=None):
    compute = compute or ComputeConfig()
    optimizer = make_optimizer(OptimizerConfig(1e-3), 10)
    abstract = abstract_state(model, optimizer, mesh, compute)
    return init_state(model, optimizer, abstract, 0, compute)


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_takes_what_is_given_and_keeps_the_rest(model, params, one_device):
    before = jax.tree.map(np.array, params)
    state = make_state(model, one_device)
    trunk = with_parameters(state, {"trunk": params["trunk"]})
    assert_equal(trunk.params["trunk"], params["trunk"])
    assert_equal(trunk.params["heads"], state.params["heads"])
    both = with_parameters(state, {"trunk": params["trunk"], "heads": params["heads"]})
    assert_equal(both.params, params)
    assert both.step == 0
    # A step consumes its state, not what it was made of.
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(both)
    assert_equal(params, before)


def test_takes_another_dtype_and_the_places_of_the_state(model, params, one_device):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    found = with_parameters(make_state(model, one_device), {"heads": half["heads"]})
    for leaf, old in zip(
        jax.tree.leaves(found.params["heads"]),
        jax.tree.leaves(half["heads"]),
        strict=True,
    ):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, old.astype(jnp.float32))


def test_stacks_layers_where_the_state_does(model, params, one_device):
    state = make_state(model, one_device, ComputeConfig(scan_layers=True))
    found = with_parameters(state, dict(params))
    assert is_stacked(found.params["trunk"])
    assert_equal(unstack_layers(found.params["trunk"]), params["trunk"])
