"""Training a block drafter: its loss against JAX's own gradients, and whole runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError, warn
from bpd_jax.models.attachment_files import load_drafter
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.parameters import abstract_parameters
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.heads import train_heads as module
from bpd_jax.training.heads.drafter_batches import BlockBatch
from bpd_jax.training.heads.drafter_objective import DrafterObjective, bounded_scale
from bpd_jax.training.heads.train_heads import train_heads
from bpd_jax.training.metrics import read_rows
from tests.decoding.random_models import random_params

DRAFTER = BlockDrafterConfig(
    feature_layers=(0,), block_size=4, num_layers=1, window=8, draft_vocabulary=20
)


@pytest.fixture
def config(config):
    return dataclasses.replace(
        config, heads=DRAFTER, batch_size=64, epochs=12, anchors_per_row=8
    )


def batch_of(d_model=24, layers=1):
    rng = np.random.default_rng(1)
    valid = np.ones((3, 5, 4), bool)
    valid[0, 4] = False
    valid[2, 1, 2:] = False
    return BlockBatch(
        rng.normal(0, 1, (3, 16, d_model * (1 + layers))).astype(np.float16),
        np.array([0, 4, 0], np.int32),
        rng.integers(8, 13, (3, 5)).astype(np.int32),
        rng.integers(0, 61, (3, 5, 4)).astype(np.int32),
        valid,
    )


DFLASH2 = {
    "markov_rank": 3,
    "markov_reads_state": True,
    "convolution_taps": 2,
    "convolution_group": 8,
}


def plain_loss(trained, objective, frozen, batch):
    """The loss from all logits at once, to be differentiated by JAX."""
    config, functions = objective.config, objective.functions
    anchors = frozen["embedding"][batch.tokens[..., 0]]
    states = functions.teacher_forced_states(
        trained,
        jnp.asarray(batch.states[..., 24:]),
        batch.offsets[:, None] + jnp.arange(16),
        anchors,
        batch.anchors,
    )
    logits = states @ frozen["softmax"].T
    if "markov" in trained:
        head = trained["markov"]
        factors = states @ head["project"] if "project" in head else 1
        embedded = head["embedding"][batch.tokens[..., :-1]]
        logits += (factors * embedded) @ head["output"].T
    log_probs = jax.nn.log_softmax(logits)
    draft_ids = np.full(61, -1)
    draft_ids[np.asarray(frozen["vocabulary"])] = np.arange(20)
    targets = draft_ids[batch.tokens[..., 1:]]
    scored = (targets >= 0) & batch.valid[..., 1:]
    target_log_probs = jnp.take_along_axis(
        log_probs, np.maximum(targets, 0)[..., None], -1
    )[..., 0]
    losses = -target_log_probs
    if config.soft_targets:
        share = config.soft_targets
        positions = batch.anchors[..., None] + np.arange(3)
        later_states = batch.states[np.arange(3)[:, None, None], positions, :24]
        soft_targets = jax.nn.softmax(
            later_states.astype(np.float32) @ frozen["softmax"].T
        )
        losses = (1 - share) * losses - share * jnp.sum(soft_targets * log_probs, -1)
    if config.position_weights == "dpace":
        q = 0.5 * jnp.exp(jax.lax.stop_gradient(target_log_probs)) + 0.5
        prefix = jnp.cumprod(jnp.where(scored, q, 1), -1) * scored
        weights = jnp.stack([prefix[..., j:].sum(-1) for j in range(3)], -1)
        return jnp.sum(weights * losses, where=scored) / scored.sum()
    lambdas = np.array(config.lambdas)
    means = [
        jnp.sum(losses[..., j], where=scored[..., j]) / scored[..., j].sum()
        for j in range(3)
    ]
    return sum(w * mean for w, mean in zip(lambdas / lambdas.sum(), means, strict=True))


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"position_weights": "dpace"}, {}),
        ({"soft_targets": 0.7, "position_decay": 2.0}, {"markov_rank": 3}),
        ({}, DFLASH2),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_those_of_the_plain_loss(
    config, model, params, settings, sizes
):
    drafter = dataclasses.replace(DRAFTER, **sizes)
    config = dataclasses.replace(config, heads=drafter, **settings)
    objective = DrafterObjective(config, model)
    plan = module.make_plan(config, model, params)
    trained, arrays = objective.init(params, plan.vocabulary, jax.random.key(0))
    trained = random_params(trained, 0.3, 0)
    batch = batch_of()
    gradient = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))
    (loss, sums), gradients = gradient(trained, arrays, batch)
    plain = jax.jit(lambda weights: plain_loss(weights, objective, arrays, batch))
    expected, expected_gradients = jax.value_and_grad(plain)(trained)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    for gradient, expected_gradient in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=2e-3, atol=2e-5)
    assert sums.valid.tolist() == batch.valid[..., 1:].sum((0, 1)).tolist()


@pytest.mark.parametrize("size, spread", [(1.0, 5.0), (0.01, 0.64)])
def test_logits_of_an_untrained_drafter_are_bounded(size, spread):
    """Directions that all rows share do not matter."""
    rows = np.random.default_rng(0).normal(size=(6000, 64)) * size + 3
    scale = np.full(64, 8.0, np.float32)
    bounded = bounded_scale(jnp.asarray(scale), jnp.asarray(rows, jnp.float32))
    states = np.random.default_rng(1).normal(size=(50, 64))
    logits = (states * np.asarray(bounded)) @ (rows - rows.mean(0)).T
    assert logits.std() == pytest.approx(spread, rel=0.1)


def test_training_learns_the_next_tokens(
    tmp_path, config, model, params, base_key, capsys
):
    """Tokens have two possible successors: only the anchor is informative."""
    # The layers are the default ones, here the only one.
    confident = {"confidence": True, "confidence_reads_markov": True}
    drafter = dataclasses.replace(
        DRAFTER, feature_layers=(), markov_rank=4, **confident
    )
    config = dataclasses.replace(config, heads=drafter, products="bfloat16")
    warn.cache_clear()
    held_out = train_heads(config, model, params, tmp_path)
    assert "are held out, on which accuracies are uncertain" in capsys.readouterr().err
    # Without the anchor, as for block heads, four tokens would be possible here.
    assert held_out.tops()[2][0] > 0.8 * held_out.coverage[0]
    assert held_out.chains[0] == held_out.tops()[1][0] > held_out.chains[2] > 0
    loaded = load_drafter(tmp_path / "drafter")
    assert (loaded.base, loaded.base_name) == (base_key, "tiny")
    assert loaded.facts["tokens_per_call"] == held_out.tokens_per_call


def test_training_on_a_mesh_equals_one_device(tmp_path, config, model, params):
    config = dataclasses.replace(config, steps=6, evaluate_every=6)
    single = train_heads(config, model, params, tmp_path / "alone")
    mesh = MeshConfig(data=2, fsdp=2, model=2)
    config = dataclasses.replace(config, mesh=mesh)
    shapes = abstract_parameters(model, make_mesh(mesh))
    shards = jax.device_put(params, jax.tree.map(lambda x: x.sharding, shapes))
    train_heads(config, model, shards, tmp_path / "shared")
    resumed = train_heads(config, model, shards, tmp_path / "shared")
    assert resumed.metrics() == pytest.approx(single.metrics(), rel=1e-3)
    for name in ("loss", "gradient_norm"):
        expected, actual = (
            [row[name] for row in read_rows(tmp_path / folder / "metrics.jsonl")
             if name in row]
            for folder in ("alone", "shared")
        )  # fmt: skip
        np.testing.assert_allclose(actual, expected, rtol=1e-4)
    # The result does not depend on the mesh: one device resumes a run of several.
    unsharded = dataclasses.replace(config, mesh=None)
    train_heads(unsharded, model, params, tmp_path / "shared")


def test_batch_size_not_divisible_by_the_mesh_is_refused(
    tmp_path, config, model, params
):
    config = dataclasses.replace(config, batch_size=40, mesh=MeshConfig(data=8))
    with pytest.raises(UserError, match="anchors_per_row = 5 is not a multiple"):
        train_heads(config, model, params, tmp_path)
    assert not any(tmp_path.iterdir())


def test_training_starts_from_trained_parameters(tmp_path, config, model, params):
    config = dataclasses.replace(config, heads_dtype="float32", steps=6)
    first = train_heads(config, model, params, tmp_path / "first")
    start = tmp_path / "first" / "drafter"
    optimizer = OptimizerConfig(1e-9, warmup_steps=0)
    slow = dataclasses.replace(config, start=str(start), steps=1, optimizer=optimizer)
    second = train_heads(slow, model, params, tmp_path / "second")
    np.testing.assert_allclose(second.facts()["loss"], first.facts()["loss"], rtol=1e-3)
    facts = load_drafter(tmp_path / "second" / "drafter").facts
    assert facts["start"]["identity"] == load_drafter(start).identity
    assert facts["start"]["steps"] > 1
    deeper = dataclasses.replace(slow, heads=dataclasses.replace(DRAFTER, num_layers=2))
    with pytest.raises(UserError, match=r"HeadsTrainConfig\.start"):
        train_heads(deeper, model, params, tmp_path / "third")
