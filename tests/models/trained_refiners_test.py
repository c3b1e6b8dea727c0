import functools

import jax
import numpy as np

from bpd_jax.models import trained_refiners
from bpd_jax.models.trained_refiners import MarkovConfig
from tests.decoding.random_models import random_params

# A prime that no other size equals, so that arrays of size V are recognised.
VOCAB, WIDTH, HEADS = 97, 8, 4
MARKOV = MarkovConfig(VOCAB, WIDTH, HEADS, rank=5)


@functools.cache
def parameters(config):
    """Random parameters, the zero-initialised ones included."""
    shapes = jax.eval_shape(config.init, jax.random.key(0))
    return random_params(shapes, 0.5, 0)


def tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCAB, shape)


def test_a_new_refiner_changes_nothing():
    params, candidates = MARKOV.init(jax.random.key(1)), tokens(9, 2, 3, 4)
    scores = trained_refiners.markov_scores(params, tokens(1, 2, 3), candidates, 2)
    assert not scores.any()


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
    assert VOCAB not in sizes
