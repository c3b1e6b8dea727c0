"""Checkpoints and trunks of runs whose layers are stacked for a scan."""

import jax
import numpy as np
import optax

from bpd_jax.models.blockwise import init_parameters
from bpd_jax.models.compute import ComputeConfig
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.models.stacking import is_stacked
from bpd_jax.training.checkpoints import Checkpoints, load_parameters
from bpd_jax.training.state import abstract_state, init_state

STACKED = ComputeConfig(scan_layers=True)
OPTIMIZER = optax.sgd(0.1)


def make_state(model, mesh, seed):
    abstract = abstract_state(model, OPTIMIZER, mesh, STACKED)
    return init_state(model, OPTIMIZER, abstract, seed, STACKED)


def test_stacked_checkpoint_is_loaded_unstacked(model, one_device, tmp_path):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    state = make_state(model, mesh, seed=5)
    assert is_stacked(state.params["trunk"])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
    want = init_parameters(model, jax.random.key(5), one_device)
    for target_mesh in (None, mesh):
        loaded = load_parameters(tmp_path, model, mesh=target_mesh)
        jax.tree.map(np.testing.assert_array_equal, loaded, want)
    kernel = loaded["trunk"]["mlp_0"]["input"]["kernel"]
    assert kernel.sharding.spec == jax.sharding.PartitionSpec("fsdp", "model")
