import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from bpd_jax.data.rows import make_batch
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.state import abstract_state, init_state
from bpd_jax.training.step import make_eval_step, make_train_step, put_batch

LAMBDAS = (1.0, 1.0, 1.0)
OPTIMIZER = make_optimizer(OptimizerConfig(1e-2, weight_decay=0.1), 10)


# Adam would blow up rounding: the gradient of a key's bias is 0 in exact arithmetic.
PLAIN = optax.sgd(0.1, momentum=0.9)


def run(model, batch, mesh, steps=3):
    abstract = abstract_state(model, PLAIN, mesh)
    state = init_state(model, PLAIN, abstract, seed=0)
    step = make_train_step(model, PLAIN, LAMBDAS, abstract, mesh)
    for _ in range(steps):
        state, metrics = step(state, put_batch(batch, mesh))
    return jax.device_get((state, metrics))


@pytest.fixture(scope="module")
def alone(model, batch, one_device):
    return run(model, batch, one_device)


@pytest.mark.parametrize(
    "config",
    [
        MeshConfig(data=8),
        MeshConfig(data=2, fsdp=4),
        MeshConfig(data=1, fsdp=2, model=4),
    ],
    ids=["data", "fsdp", "model"],
)
def test_meshes_equal_one_device(model, batch, alone, config):
    state, metrics = run(model, batch, make_mesh(config))
    for name, expected in alone[1].items():
        np.testing.assert_allclose(metrics[name], expected, rtol=1e-4, err_msg=name)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        state,
        alone[0],
    )


def test_loss_falls_and_metrics_are_whole(model, batch, one_device, alone):
    _, first = run(model, batch, one_device, steps=1)
    assert alone[1]["loss"] < first["loss"]
    assert first["loss_heads"].shape == first["accuracy_heads"].shape == (3,)
    # A new model knows nothing: about log V, and half the variance of its logits, 1.
    np.testing.assert_allclose(first["loss_heads"], np.log(280) + 0.5, atol=0.3)
    np.testing.assert_allclose(first["loss"], first["loss_heads"].sum(), rtol=1e-5)
    assert first["gradient_norm"] > 0
    assert alone[0].step == 3


def test_the_step_consumes_its_state(model, batch):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    abstract = abstract_state(model, OPTIMIZER, mesh)
    state = init_state(model, OPTIMIZER, abstract, seed=0)
    step = make_train_step(model, OPTIMIZER, LAMBDAS, abstract, mesh)
    rows = put_batch(batch, mesh)
    memory = step.lower(abstract, rows).compile().memory_analysis()
    sizes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(abstract)]
    assert memory.alias_size_in_bytes >= 4 * sum(np.prod(size) for size in sizes)
    step(state, rows)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_optimizer_state_lies_where_its_parameters_lie(model):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    abstract = abstract_state(model, OPTIMIZER, mesh)
    state = init_state(model, OPTIMIZER, abstract, seed=0)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(
        lambda x: x.sharding, abstract
    )
    embedding = state.params["trunk"]["embedding"]
    assert embedding.sharding.spec == PartitionSpec("model", "fsdp")
    same = [
        leaf.sharding.spec
        for leaf in jax.tree.leaves(state.opt_state)
        if leaf.shape == embedding.shape
    ]
    assert same == [embedding.sharding.spec] * 2


def test_evaluation_adds_up_over_batches(model, batch, one_device):
    abstract = abstract_state(model, OPTIMIZER, one_device)
    params = init_state(model, OPTIMIZER, abstract, seed=0).params
    evaluate = make_eval_step(model, LAMBDAS, abstract, one_device)
    whole = evaluate(params, batch)
    halves = [
        evaluate(params, make_batch(batch.tokens[part], batch.segment_ids[part]))
        for part in (slice(0, 4), slice(4, 8))
    ]
    for total, *parts in zip(whole, *halves, strict=True):
        np.testing.assert_allclose(total, sum(parts), rtol=1e-5)
    np.testing.assert_array_equal(whole.valid, [8 * 8, 8 * 6, 8 * 4])
