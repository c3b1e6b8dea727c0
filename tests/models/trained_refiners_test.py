import functools

import jax
import jax.numpy as jnp
import numpy as np

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
    shapes = jax.eval_shape(config.init, jax.random.key(0))
    return random_params(shapes, 0.5, 0)


def tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCAB, shape)


def states(seed, *shape):
    values = np.random.default_rng(seed).normal(0, 3, shape)
    return jnp.asarray(values, jnp.float32)


def test_a_new_refiner_changes_nothing():
    key = jax.random.key(1)
    hidden, candidates = states(8, 2, WIDTH), tokens(9, 2, 3, 4)
    params = MARKOV.init(key)
    scores = trained_refiners.markov_scores(params, tokens(1, 2, 3), candidates, 2)
    assert not scores.any()
    params = RECURRENT.init(key)
    state = jnp.repeat(
        trained_refiners.recurrent_start(params, hidden)[:, None], 3, axis=1
    )
    state = trained_refiners.recurrent_step(params, state, tokens(2, 2, 3))
    assert state.any()
    assert not trained_refiners.recurrent_scores(params, state, candidates, 1).any()
    params = HYDRA.init(key)
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
