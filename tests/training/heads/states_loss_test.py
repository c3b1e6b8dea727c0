import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.block_heads import apply_head, condition, head_shapes, is_trained
from bpd_jax.models.blockwise_config import BlockHeadsConfig
from bpd_jax.training.heads.states_loss import (
    Targets,
    chunk_size,
    draft_targets,
    loss_and_gradients,
)

WIDTH, VOCAB, N = 10, 31, 12
LAMBDAS = (1.0, 0.5)
CONFIGS = {
    "feed_forward": BlockHeadsConfig(3, 7, draft_vocabulary=13),
    "whole vocabulary": BlockHeadsConfig(3, 7, residual=False),
    "medusa": BlockHeadsConfig(3, kind="medusa", layers=2, draft_vocabulary=13),
    "own softmax": BlockHeadsConfig(3, kind="medusa", own_softmax=True),
}


def arrays(config):
    rng = np.random.default_rng(0)
    shapes = head_shapes(config, WIDTH, VOCAB)
    trained = {
        name: jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)
        for name, shape in shapes.items()
        if is_trained(config, name)
    }
    size = config.draft_vocabulary or VOCAB
    matrix = jnp.asarray(rng.normal(0, 0.5, (size, WIDTH)), jnp.float32)
    states = jnp.asarray(rng.normal(0, 1, (N, WIDTH)), jnp.float32)
    valid = rng.random((2, N)) < 0.8
    scored = valid & (rng.random((2, N)) < 0.7)
    places = jnp.asarray(rng.integers(0, size, (2, N)))
    targets = Targets(places, jnp.asarray(scored), jnp.asarray(valid))
    return trained, None if config.own_softmax else matrix, states, targets


def plain_loss(config, trained, matrix, states, targets):
    """The loss from all logits at once, to be differentiated by JAX."""
    total = 0.0
    for level, weight in enumerate(LAMBDAS):
        layers = {k: v[level] for k, v in trained.items() if k != "softmax"}
        state = apply_head(config, layers, states, dtype="float32")
        softmax = trained["softmax"][level] if matrix is None else matrix
        log_probs = jax.nn.log_softmax(state @ softmax.T)
        target_log_probs = log_probs[jnp.arange(N), targets.places[level]]
        count = targets.scored[level].sum()
        total -= weight * jnp.sum(target_log_probs, where=targets.scored[level]) / count
    return total


PLAIN = jax.jit(jax.value_and_grad(plain_loss, 1), static_argnums=0)
COMPILED = jax.jit(
    loss_and_gradients,
    static_argnums=(0, 5),
    static_argnames=("soft_targets", "products", "chunk"),
)


@pytest.mark.parametrize("chunk", [None, 4, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_equal_those_of_the_plain_loss(name, chunk):
    config = CONFIGS[name]
    trained, matrix, states, targets = arrays(config)
    loss, sums, gradients, _ = COMPILED(
        config, trained, matrix, states, targets, LAMBDAS, chunk=chunk
    )
    want, want_gradients = PLAIN(config, trained, matrix, states, targets)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_array_equal(sums.scored, targets.scored.sum(1))
    np.testing.assert_array_equal(sums.valid, targets.valid.sum(1))
    assert gradients.keys() == want_gradients.keys()
    for key, gradient in want_gradients.items():
        assert float(jnp.abs(gradient).max()) > 1e-3
        np.testing.assert_allclose(gradients[key], gradient, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_loss_and_gradients_with_soft_targets(share, chunk):
    config = CONFIGS["feed_forward"]
    trained, matrix, states, targets = arrays(config)
    levels = len(targets.places)
    later = jax.random.normal(jax.random.key(9), (levels, *states.shape))

    def plain(trained):
        total = 0.0
        for level in range(levels):
            weights = {name: value[level] for name, value in trained.items()}
            state = apply_head(config, weights, states, dtype="float32")
            log_probs = jax.nn.log_softmax(state @ matrix.T)
            hard = jax.nn.one_hot(targets.places[level], len(matrix))
            soft = jax.nn.softmax(later[level] @ matrix.T)
            losses = -((1 - share) * hard + share * soft) @ log_probs.T
            scored = targets.scored[level]
            mean = jnp.sum(jnp.diag(losses), where=scored) / scored.sum()
            total += LAMBDAS[level] * mean
        return total

    loss, _, gradients, _ = COMPILED(
        config,
        trained,
        matrix,
        states,
        targets,
        LAMBDAS,
        later=later,
        soft_targets=share,
        chunk=chunk,
    )
    want, want_gradients = jax.jit(jax.value_and_grad(plain))(trained)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for key, gradient in want_gradients.items():
        assert float(jnp.abs(gradient).max()) > 1e-3
        np.testing.assert_allclose(gradients[key], gradient, atol=2e-6, err_msg=key)


def test_a_head_without_targets_contributes_nothing():
    config = CONFIGS["feed_forward"]
    trained, matrix, states, targets = arrays(config)
    no_targets = jnp.zeros_like(targets.scored[1])
    first_only = Targets(
        targets.places,
        jnp.stack([targets.scored[0], no_targets]),
        jnp.stack([targets.valid[0], no_targets]),
    )
    loss, sums, gradients, _ = loss_and_gradients(
        config, trained, matrix, states, first_only, LAMBDAS
    )
    assert float(sums.loss[1]) == float(sums.valid[1]) == 0
    np.testing.assert_allclose(loss, sums.loss[0] / sums.scored[0], rtol=1e-6)
    assert float(jnp.abs(gradients["kernel_out"][0]).max()) > 0
    assert float(jnp.abs(gradients["kernel_out"][1]).max()) == 0


@pytest.mark.parametrize("chunk", [None, 4])
def test_gradients_of_conditioned_heads(chunk):
    config = BlockHeadsConfig(
        3, 7, draft_vocabulary=13, feature_layers=(2, 0), reads_anchor=True, condition=5
    )
    trained, matrix, states, targets = arrays(config)
    rng = np.random.default_rng(4)
    embedded = jnp.asarray(rng.normal(0, 0.01, (N, WIDTH)), jnp.float32)
    features = jnp.asarray(rng.normal(0, 20, (N, 2 * WIDTH)), jnp.float32)

    def plain(trained):
        side = condition(config, trained["kernel_condition"], embedded, features)
        total = 0.0
        for level, weight in enumerate(LAMBDAS):
            w = {k: v[level] for k, v in trained.items() if k != "kernel_condition"}
            inner = states @ w["kernel_in"] + side @ w["kernel_side"] + w["bias_in"]
            state = states + jax.nn.silu(inner) @ w["kernel_out"] + w["bias_out"]
            log_probs = jax.nn.log_softmax(state @ matrix.T)
            target_log_probs = log_probs[jnp.arange(N), targets.places[level]]
            count = targets.scored[level].sum()
            total -= (
                weight * jnp.sum(target_log_probs, where=targets.scored[level]) / count
            )
        return total

    want, want_gradients = jax.value_and_grad(plain)(trained)
    side, pull = jax.vjp(
        lambda kernel: condition(config, kernel, embedded, features),
        trained["kernel_condition"],
    )
    # Inputs are normalised, whatever their scale.
    expected = [embedded, *jnp.split(features, 2, -1)]
    expected = [x / np.sqrt(np.mean(x**2, -1, keepdims=True)) for x in expected]
    np.testing.assert_allclose(
        side, np.concatenate(expected, -1) @ trained["kernel_condition"], rtol=1e-3
    )
    loss, _, gradients, side_gradient = loss_and_gradients(
        config, trained, matrix, states, targets, LAMBDAS, side=side, chunk=chunk
    )
    gradients["kernel_condition"] = pull(side_gradient)[0]
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert gradients.keys() == want_gradients.keys()
    for key, gradient in want_gradients.items():
        assert float(jnp.abs(gradient).max()) > 1e-3
        np.testing.assert_allclose(gradients[key], gradient, atol=1e-5, err_msg=key)


def test_bfloat16_products_are_close():
    config = CONFIGS["feed_forward"]
    trained, matrix, states, targets = arrays(config)
    results = [
        loss_and_gradients(
            config, trained, matrix, states, targets, LAMBDAS, products=products
        )
        for products in ("float32", "bfloat16")
    ]
    (loss, _, exact, _), (rough_loss, _, rough, _) = results
    np.testing.assert_allclose(rough_loss, loss, rtol=2e-2)
    for key, gradient in exact.items():
        assert rough[key].dtype == jnp.float32
        np.testing.assert_allclose(rough[key], gradient, atol=2e-2, err_msg=key)


def test_no_array_of_all_positions_and_the_vocabulary_exists():
    config = BlockHeadsConfig(3, 7, draft_vocabulary=1000)
    trained, matrix, states, targets = arrays(config)
    jaxpr = jax.make_jaxpr(
        lambda *x: loss_and_gradients(config, *x, LAMBDAS, chunk=3)[0]
    )(trained, matrix, states, targets)
    assert "f32[3,1000]" in str(jaxpr)
    assert "[12,1000]" not in str(jaxpr)


def test_targets_outside_the_draft_vocabulary_are_misses():
    # Text "5 7 2 9 4" after the position, heads 2 … 4 and tokens 2, 4, 7 to draft.
    tokens, valid = jnp.array([[7, 2, 9], [2, 9, 4]]), jnp.array([[1, 1, 1], [1, 1, 0]])
    targets = draft_targets(tokens, valid > 0, jnp.array([2, 4, 7]), 10)
    assert (targets.places * targets.scored).tolist() == [[2, 0], [0, 0], [0, 0]]
    assert targets.scored.astype(int).tolist() == [[1, 1], [1, 0], [0, 0]]
    assert targets.valid.astype(int).tolist() == [[1, 1], [1, 1], [1, 0]]
    all_targets = draft_targets(tokens, valid > 0, None, 10)
    assert all_targets.places.tolist() == tokens.T.tolist()
    assert all_targets.scored.tolist() == all_targets.valid.tolist()


def test_chunks_divide_the_positions():
    assert chunk_size(2048, 8192) == 1024
    assert chunk_size(2048, 49152) == 128
    assert chunk_size(7, 100) == 7
    assert chunk_size(7, 2**22) == 1
