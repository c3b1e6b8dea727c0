import functools
import re

import jax
import numpy as np
import optax

from bpd_jax.data.rows import make_batch
from bpd_jax.models.layers import is_stacked, unstack_layers
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.partitioning import from_own_rows
from bpd_jax.models.transformer_config import ComputeConfig
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.loss import BlockwiseLoss
from bpd_jax.training.state import abstract_state, init_state, make_optimizer
from bpd_jax.training.step import make_train_step, split_rows
from tests.training.runs import assert_close

LAMBDAS = np.ones(3, np.float32)
DEFAULT = ComputeConfig()
OPTIMIZER = make_optimizer(OptimizerConfig(1e-2, weight_decay=0.1), 10)


# Adam would amplify rounding: the exact gradient of a key's bias is 0.
PLAIN = optax.sgd(0.1, momentum=0.9)


@functools.cache
def compiled(model, mesh, compute):
    abstract = abstract_state(model, PLAIN, mesh, compute)
    return abstract, make_train_step(
        BlockwiseLoss(model, compute, mesh=mesh), LAMBDAS, PLAIN, abstract
    )


def run(model, batch, mesh, steps=3, compute=DEFAULT):
    """The state after a few steps, its layers one by one, and the last metrics."""
    abstract, step = compiled(model, mesh, compute)
    state = init_state(model, PLAIN, abstract, 0, compute)
    for _ in range(steps):
        state, metrics = step(state, from_own_rows(batch, mesh))
    return jax.device_get((split(state), metrics))


def split(tree):
    """Any tree of trunks, stacked or not, with their layers one by one."""
    if isinstance(tree, dict):
        tree = {name: split(value) for name, value in tree.items()}
        return unstack_layers(tree) if is_stacked(tree) else tree
    if isinstance(tree, tuple):
        parts = [split(value) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


def test_a_mesh_and_compute_settings_equal_one_device(model, batch, one_device):
    expected_state, expected = run(model, batch, one_device)
    compute = ComputeConfig("pallas", "full", 4, scan_layers=True, accumulate=2)
    state, metrics = run(model, batch, make_mesh(MeshConfig(2, 2, 2)), compute=compute)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    assert_close(state, expected_state, rtol=1e-4, atol=1e-6)


def test_accumulated_parts_are_weighted_by_their_targets(model, one_device):
    """Rows of different lengths: the mean of the means of the parts would differ."""
    tokens = np.random.default_rng(1).integers(1, 280, (4, 12))
    segment_ids = (np.arange(12) < np.array([[12], [11], [4], [3]])).astype(int)
    batch = make_batch(tokens * segment_ids, segment_ids)
    expected, expected_metrics = run(model, batch, one_device, steps=1)
    compute = ComputeConfig(accumulate=2)
    state, metrics = run(model, batch, one_device, steps=1, compute=compute)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)
    assert_close(state.params, expected.params, rtol=1e-5, atol=1e-7)


def test_splitting_a_batch_moves_no_row_between_devices():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    rows = np.arange(16).repeat(3).reshape(16, 3)
    batch = from_own_rows(make_batch(rows, rows), mesh)
    split_in_two = jax.jit(lambda batch: split_rows(batch, 2, mesh))
    program = split_in_two.lower(batch).compile()
    assert not re.search("all-to-all|all-gather|collective", program.as_text())
    np.testing.assert_array_equal(
        program(batch).tokens[:, :, 0],
        [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]],
    )


def test_non_finite_step_keeps_the_state(model, batch, one_device):
    compute = ComputeConfig(accumulate=2)
    abstract = abstract_state(model, OPTIMIZER, one_device)
    state = init_state(model, OPTIMIZER, abstract, seed=0)
    original = jax.device_get(state)
    loss = BlockwiseLoss(model, compute, mesh=one_device)
    infinite, step = (
        make_train_step(loss, weights, OPTIMIZER, abstract)
        for weights in ((1, np.inf, 1), LAMBDAS)
    )
    updated, metrics = infinite(state, from_own_rows(batch, one_device))
    assert not metrics["finite"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(updated), original)
    updated, metrics = step(updated, from_own_rows(batch, one_device))
    assert metrics["finite"]
    assert updated.step == 1


def test_step_donates_its_state(model, batch):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    abstract = abstract_state(model, OPTIMIZER, mesh)
    state = init_state(model, OPTIMIZER, abstract, seed=0)
    shardings = [jax.tree.map(lambda x: x.sharding, tree) for tree in (state, abstract)]
    assert shardings[0] == shardings[1]
    step = make_train_step(
        BlockwiseLoss(model, mesh=mesh), LAMBDAS, OPTIMIZER, abstract
    )
    rows = from_own_rows(batch, mesh)
    program = step.lower(abstract, rows).compile()
    sizes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(abstract)]
    aliased = program.memory_analysis().alias_size_in_bytes
    assert aliased >= 4 * sum(np.prod(size) for size in sizes)
    program(state, rows)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
