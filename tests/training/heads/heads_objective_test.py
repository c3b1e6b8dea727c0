"""The loss of heads on states of a frozen model, against plain losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.block_heads import apply_head, condition, head_shapes, is_trained
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.training import levels_loss
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.heads.batches import PositionBatch
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.heads.heads_objective import HeadsObjective
from bpd_jax.training.levels_loss import targets_of

WIDTH, VOCAB, N = 10, 31, 12
MODEL = BlockwiseConfig(TransformerConfig(VOCAB, 2, WIDTH, 16, 2, max_length=8))
LAMBDAS = (1.0, 0.5)
DRAFT = 13
CONFIGS = {
    "feed_forward": BlockHeadsConfig(3, 7, draft_vocabulary=DRAFT),
    "medusa": BlockHeadsConfig(3, kind="medusa", layers=2, draft_vocabulary=DRAFT),
    "own softmax": BlockHeadsConfig(3, kind="medusa", own_softmax=True),
}
CONDITIONED = BlockHeadsConfig(
    3, 7, draft_vocabulary=DRAFT, feature_layers=(1, 0), reads_anchor=True, condition=5
)


def objective(config, **settings):
    settings = {"head_weights": LAMBDAS} | settings
    return HeadsObjective(
        HeadsTrainConfig(
            model="model",
            data="texts",
            heads=config,
            optimizer=OptimizerConfig(1e-2),
            **settings,
        ),
        MODEL,
    )


def arrays(config):
    """Trained and frozen parameters, and a batch; some targets are not drafted."""
    rng = np.random.default_rng(0)

    def normal(deviation, *shape):
        return jnp.asarray(rng.normal(0, deviation, shape), jnp.float32)

    trained = {
        name: normal(0.5, *shape)
        for name, shape in head_shapes(config, WIDTH, VOCAB).items()
        if is_trained(config, name)
    }
    frozen = {"embedding": normal(0.01, VOCAB, WIDTH)}
    if config.draft_vocabulary:
        frozen["vocabulary"] = jnp.arange(0, 2 * DRAFT, 2)
    if not config.own_softmax:
        frozen["matrix"] = normal(0.5, config.draft_vocabulary or VOCAB, WIDTH)
    states = rng.normal(0, 1, (N, WIDTH * (1 + len(config.feature_layers))))
    tokens = rng.integers(0, 2 * DRAFT, (N, 3))
    batch = PositionBatch(np.float32(states), tokens, rng.random((N, 3)) < 0.8)
    return trained, frozen, batch


def plain_loss(config, trained, frozen, batch, share=0.0):
    """The loss from all logits at once, to be differentiated by JAX."""
    targets = targets_of(batch, frozen, MODEL)
    states, side = jnp.asarray(batch.states)[:, :WIDTH], None
    if config.is_conditioned:
        embedded = frozen["embedding"][batch.tokens[:, 0]]
        features = jnp.asarray(batch.states)[:, WIDTH:]
        side = condition(config, trained["kernel_condition"], embedded, features)
    total = 0.0
    for level, weight in enumerate(LAMBDAS):
        layer = {
            name: value[level]
            for name, value in trained.items()
            if name not in ("softmax", "kernel_condition")
        }
        state = apply_head(config, layer, states, side, dtype="float32")
        matrix = frozen.get("matrix")
        matrix = trained["softmax"][level] if matrix is None else matrix
        wanted = jax.nn.one_hot(targets.places[:, level], len(matrix))
        if share:
            soft = jax.nn.softmax(batch.later[:, level] @ matrix.T)
            wanted = (1 - share) * wanted + share * soft
        losses = -(wanted * jax.nn.log_softmax(state @ matrix.T)).sum(1)
        scored = targets.scored[:, level]
        total += weight * jnp.sum(losses, where=scored) / scored.sum()
    return total


def gradients_of(objective):
    """A compiled function that returns ((loss, sums), gradients)."""
    return jax.jit(jax.value_and_grad(objective.loss, has_aux=True))


plain_gradients = jax.jit(jax.value_and_grad(plain_loss, 1), static_argnums=(0, 4))


def assert_close(gradients, wanted, tolerance):
    assert gradients.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert float(jnp.abs(gradient).max()) > 1e-3
        np.testing.assert_allclose(
            gradients[key], gradient, atol=tolerance, err_msg=key
        )


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Three chunks of four positions, with the two levels of each."""
    monkeypatch.setattr(levels_loss, "chunk_size", lambda count, width: 4)


@pytest.mark.parametrize(
    "config, share",
    [
        *((config, 0.0) for config in CONFIGS.values()),
        (CONFIGS["feed_forward"], 0.3),
        (CONDITIONED, 0.0),
    ],
    ids=[*CONFIGS, "soft targets", "conditioned"],
)
def test_loss_and_gradients_equal_those_of_the_plain_loss(config, share):
    trained, frozen, batch = arrays(config)
    if share:
        later = jax.random.normal(jax.random.key(9), (N, 2, WIDTH))
        batch = batch._replace(later=later)
    if config.is_conditioned:
        batch = batch._replace(states=batch.states * np.float32([1] * 10 + [20] * 20))
    (loss, sums), gradients = gradients_of(objective(config, soft_targets=share))(
        trained, frozen, batch
    )
    wanted, wanted_gradients = plain_gradients(config, trained, frozen, batch, share)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    targets = targets_of(batch, frozen, MODEL)
    np.testing.assert_array_equal(sums.scored, targets.scored.sum(0))
    np.testing.assert_array_equal(sums.valid, targets.valid.sum(0))
    tolerance = 1e-5 if config.is_conditioned else 2e-6
    assert_close(gradients, wanted_gradients, tolerance)


def test_a_head_without_targets_contributes_nothing():
    config = CONFIGS["feed_forward"]
    trained, frozen, batch = arrays(config)
    batch.valid[:, 2] = False
    (loss, sums), gradients = gradients_of(objective(config))(trained, frozen, batch)
    assert float(sums.loss[1]) == float(sums.valid[1]) == 0
    np.testing.assert_allclose(loss, sums.loss[0] / sums.scored[0], rtol=1e-6)
    assert float(jnp.abs(gradients["kernel_out"][0]).max()) > 0
    assert float(jnp.abs(gradients["kernel_out"][1]).max()) == 0
