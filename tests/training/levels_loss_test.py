"""The loss of several levels in chunks, against a plain one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.training import levels_loss as module
from bpd_jax.training.levels_loss import levels_loss

N, LEVELS, WIDTH, VOCAB = 12, 3, 10, 31


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    inputs, teacher = (
        jnp.asarray(rng.normal(0, 1, (N, LEVELS, size)), jnp.float32)
        for size in (WIDTH, WIDTH - 4)
    )
    matrix = jnp.asarray(rng.normal(0, 0.5, (VOCAB, WIDTH)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, (N, LEVELS)))
    weights = jnp.asarray(rng.random((N, LEVELS)) * (rng.random((N, LEVELS)) < 0.7))
    return inputs, matrix, targets, weights.astype(jnp.float32), teacher


def plain(inputs, matrix, targets, weights, teacher, share):
    wanted = (1 - share) * jax.nn.one_hot(targets, VOCAB)
    fixed = jax.lax.stop_gradient(matrix)[:, : teacher.shape[-1]]
    wanted += share * jax.nn.softmax(teacher @ fixed.T)
    return -jnp.sum(weights[..., None] * wanted * jax.nn.log_softmax(inputs @ matrix.T))


def compiled(function, *arguments, **settings):
    """A call of a function that is compiled anew, with the present size of chunks."""
    return jax.jit(functools.partial(function, **settings))(*arguments)


@pytest.fixture
def chunks(monkeypatch):
    """Three chunks of four positions; `drafter_test` has a single chunk."""
    monkeypatch.setattr(module, "chunk_size", lambda count, width: 4)


@pytest.mark.parametrize("columns, share", [(0, 0.3), (4, 0.3), (WIDTH, 0.0)])
def test_gradients_equal_those_of_the_plain_loss(columns, share, chunks):
    """The last columns of the matrix are trained: those that a Markov head adds."""
    inputs, matrix, *rest, teacher = arrays()

    def loss(inputs, matrix):
        settings = {"trained_columns": columns, "teacher_share": share}
        return levels_loss(inputs, matrix, *rest, teacher, **settings)[0]

    value, gradients = compiled(jax.value_and_grad(loss, (0, 1)), inputs, matrix)
    wanted, (by_inputs, by_matrix) = compiled(
        jax.value_and_grad(plain, (0, 1)), inputs, matrix, *rest, teacher, share=share
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradients[0], by_inputs, atol=1e-5)
    by_matrix = by_matrix.at[:, : WIDTH - columns].set(0)
    np.testing.assert_allclose(gradients[1], by_matrix, atol=1e-5)


def test_weights_may_depend_on_the_probabilities(chunks):
    inputs, matrix, targets, weights, _ = arrays()
    log_probs = jax.nn.log_softmax(inputs @ matrix.T)
    losses = -jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]

    def weigh(probabilities, weights):
        return weights * probabilities**2

    total, found, hits = compiled(
        levels_loss, inputs, matrix, targets, weights, weigh=weigh
    )
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_array_equal(hits, log_probs.argmax(-1) == targets)
    expected = jnp.sum(weights * jnp.exp(-losses) ** 2 * losses)
    np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_a_position_without_weight_changes_nothing():
    inputs, matrix, targets, weights, _ = arrays()
    weights = weights.at[5].set(0)
    broken = inputs.at[5].set(jnp.inf)
    loss = jax.jit(lambda x: levels_loss(x, matrix, targets, weights)[0])
    values = [loss(x) for x in (inputs, broken)]
    assert np.isfinite(values).all()
    assert values[0] == values[1]
