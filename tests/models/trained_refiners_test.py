import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models import trained_refiners
from bpd_jax.models.trained_refiners import HydraConfig, MarkovConfig, RecurrentConfig
from tests.decoding.random_models import random_params

# A prime that no other size equals, so that arrays of size V are recognised.
VOCAB, WIDTH, HEADS = 97, 8, 4
MARKOV = MarkovConfig(VOCAB, WIDTH, HEADS, rank=5)
RECURRENT = RecurrentConfig(VOCAB, WIDTH, HEADS, rank=5, width=6)
HYDRA = HydraConfig(VOCAB, WIDTH, HEADS, width=10)


@functools.cache
def parameters(config):
    """Random parameters, the zero-initialised ones included."""
    shapes = jax.eval_shape(
        functools.partial(trained_refiners.init_refiner, config), jax.random.key(0)
    )
    return random_params(shapes, 0.5, 0)


def tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCAB, shape)


def states(seed, *shape):
    values = np.random.default_rng(seed).normal(0, 3, shape)
    return jnp.asarray(values, jnp.float32)


def unit(vector):
    return vector / np.sqrt(np.mean(np.square(vector)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("level", [1, 3])
def test_markov_scores_equal_the_whole_bigram_table(level):
    w = {name: np.asarray(value) for name, value in parameters(MARKOV).items()}
    table = (w["embedding"] * w["scale"][level - 1]) @ w["output"].T
    previous, candidates = tokens(1, 2, 3), tokens(2, 2, 3, 4)
    scores = jax.jit(trained_refiners.markov_scores)(w, previous, candidates, level)
    want = table[previous[..., None], candidates]
    np.testing.assert_allclose(scores, want, atol=1e-5)
    assert scores.dtype == jnp.float32
    # Paths with the same candidates, as in a lattice.
    scores = trained_refiners.markov_scores(w, previous, candidates[:, :1], level)
    want = table[previous[..., None], candidates[:, :1]]
    np.testing.assert_allclose(scores, want, atol=1e-5)


def unrolled_recurrent(params, hidden, path):
    """Corrections of all tokens at every level, for one text and one path."""
    w = {name: np.asarray(value) for name, value in params.items()}
    size = len(w["kernel_state"])
    reset, keep, new = (slice(k * size, (k + 1) * size) for k in range(3))
    state = np.tanh(unit(hidden) @ w["kernel_start"] + w["bias_start"])
    corrections = []
    for level, token in enumerate(path, start=1):
        x = w["embedding"][token] @ w["kernel_token"] + w["bias_token"]
        s = state @ w["kernel_state"] + w["bias_state"]
        r, z = sigmoid(x[reset] + s[reset]), sigmoid(x[keep] + s[keep])
        state = z * state + (1 - z) * np.tanh(x[new] + r * s[new])
        query = state @ w["project"] * w["scale"][level - 1]
        corrections.append(w["output"] @ query)
    return np.array(corrections)


def test_recurrent_step_by_step_equals_unrolled():
    params = parameters(RECURRENT)
    hidden, paths = states(3, 2, WIDTH), tokens(4, 2, 3, HEADS - 1)
    candidates = tokens(5, 2, 3, 4)
    want = np.array(
        [
            [unrolled_recurrent(params, hidden[row], path) for path in paths[row]]
            for row in range(2)
        ]
    )
    state = trained_refiners.recurrent_start(params, hidden)
    state = jnp.repeat(state[:, None], 3, axis=1)
    step = jax.jit(trained_refiners.recurrent_step)
    for level in RECURRENT.levels:
        state = step(params, state, paths[:, :, level - 1])
        scores = trained_refiners.recurrent_scores(params, state, candidates, level)
        expected = np.take_along_axis(want[:, :, level - 1], candidates, -1)
        np.testing.assert_allclose(scores, expected, atol=1e-4)
        assert scores.dtype == jnp.float32


def hydra_state(params, hidden, embedded):
    """The state after one path of tokens, by an MLP of concatenated inputs."""
    w = {name: np.asarray(value) for name, value in params.items()}
    inputs = np.concatenate([unit(np.asarray(v)) for v in (hidden, *embedded)])
    inner = inputs @ w["kernel_in"].reshape(len(inputs), -1) + w["bias_in"]
    return hidden + (inner * sigmoid(inner)) @ w["kernel_out"] + w["bias_out"]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_hydra_states_equal_an_mlp_of_concatenated_inputs(level):
    params = parameters(HYDRA)
    hidden, embedded = states(6, 2, WIDTH), states(7, 2, 3, level, WIDTH)
    compute = jax.jit(trained_refiners.hydra_states, static_argnums=(0, 4))
    result = compute(HYDRA, params, hidden, embedded, level)
    weights = params[f"level_{level}"]
    for row in range(2):
        for path in range(3):
            want = hydra_state(weights, hidden[row], embedded[row, path])
            np.testing.assert_allclose(result[row, path], want, atol=1e-4)


def test_hydra_keeps_the_precision_of_the_model():
    hidden = states(6, 2, WIDTH).astype(jnp.bfloat16)
    embedded = states(7, 2, 3, 1, WIDTH).astype(jnp.bfloat16)
    result = trained_refiners.hydra_states(
        HYDRA, parameters(HYDRA), hidden, embedded, 1
    )
    assert result.dtype == jnp.bfloat16


def test_a_new_refiner_changes_nothing():
    key = jax.random.key(1)
    hidden, candidates = states(8, 2, WIDTH), tokens(9, 2, 3, 4)
    params = trained_refiners.init_refiner(MARKOV, key)
    scores = trained_refiners.markov_scores(params, tokens(1, 2, 3), candidates, 2)
    assert not scores.any()
    params = trained_refiners.init_refiner(RECURRENT, key)
    state = jnp.repeat(
        trained_refiners.recurrent_start(params, hidden)[:, None], 3, axis=1
    )
    state = trained_refiners.recurrent_step(params, state, tokens(2, 2, 3))
    assert state.any()
    assert not trained_refiners.recurrent_scores(params, state, candidates, 1).any()
    params = trained_refiners.init_refiner(HYDRA, key)
    embedded = states(7, 2, 3, 2, WIDTH)
    result = trained_refiners.hydra_states(HYDRA, params, hidden, embedded, 2)
    np.testing.assert_array_equal(result, jnp.repeat(hidden[:, None], 3, axis=1))


def intermediate_sizes(function, *arguments):
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return {n for eqn in jaxpr.eqns for out in eqn.outvars for n in out.aval.shape}


def test_scores_have_no_array_of_vocabulary_size():
    candidates = tokens(2, 2, 3, 4)
    sizes = intermediate_sizes(
        trained_refiners.markov_scores,
        parameters(MARKOV),
        tokens(1, 2, 3),
        candidates,
        1,
    )
    sizes |= intermediate_sizes(
        trained_refiners.recurrent_scores,
        parameters(RECURRENT),
        states(1, 2, 3, RECURRENT.width),
        candidates,
        1,
    )
    assert VOCAB not in sizes
