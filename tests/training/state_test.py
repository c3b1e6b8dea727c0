"""The state before the first step, with parameters that were trained before."""

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.models.compute import ComputeConfig
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.models.stacking import is_stacked, unstack_layers
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.state import (
    abstract_state,
    bytes_per_device,
    init_state,
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


def test_given_parameters_are_cast_to_the_dtype_of_the_state(model, params, one_device):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    state = with_parameters(make_state(model, one_device), {"heads": half["heads"]})
    for leaf, half_leaf in zip(
        jax.tree.leaves(state.params["heads"]),
        jax.tree.leaves(half["heads"]),
        strict=True,
    ):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, half_leaf.astype(jnp.float32))


def test_given_layers_are_stacked_like_the_state(model, params, one_device):
    state = make_state(model, one_device, ComputeConfig(scan_layers=True))
    updated = with_parameters(state, dict(params))
    assert is_stacked(updated.params["trunk"])
    assert_equal(unstack_layers(updated.params["trunk"]), params["trunk"])


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
