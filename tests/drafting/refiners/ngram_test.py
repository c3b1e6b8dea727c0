"""An n-gram model with the text's own bigrams, and weights that follow the entropy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.drafting.engines.viterbi import ViterbiEngine
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.ngram import NGramRefiner, mixed
from bpd_jax.drafting.refiners.transitions import Weight
from bpd_jax.drafting.searches.beam_search import BeamSearch
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.sources.heads import HeadsSource
from tests.drafting.naive import (
    all_paths,
    assert_best,
    grow_drafts,
    naive_steps,
    ngram_model,
    path_tokens,
    random_lattice,
    random_view,
    whole_text,
)

LENGTH, WIDTH, DRAFTS = 4, 3, 6


def grow(refiner, view, *searches):
    paths = Paths(HeadsSource(LENGTH, WIDTH), (refiner,))
    trees = grow_drafts(paths, view, *searches)
    return [tree.tokens.reshape(len(tree.tokens), -1, LENGTH) for tree in trees]


@pytest.mark.parametrize(
    "order, end_of_text, adaptive",
    [(1, 0, False), (2, 0, True), (3, None, True), (4, None, False)],
)
def test_walks_and_exact_search_follow_the_definition(order, end_of_text, adaptive):
    model = ngram_model(order, end_of_text)
    # Seed 11 has the end of text among the candidates.
    lattice = random_lattice(11, batch=3, length=LENGTH, width=WIDTH)
    assert (lattice.tokens[:, 1:-1] == 0).any()
    view = random_view(lattice, order)
    refiner = NGramRefiner.from_model(model, 0.6, adaptive=adaptive)
    walks, best = grow(refiner, view, BeamSearch(1), ExactBest(DRAFTS))
    for row in range(3):
        text = whole_text(view, row)
        steps = naive_steps(text, lattice, row, model, 0.6, adaptive=adaptive)
        picks = ()
        for _ in range(LENGTH - 1):
            picks = (*picks, int(np.argmax(steps(picks))))
        assert tuple(walks[row, 0].tolist()) == path_tokens(lattice, row, picks)
        assert_best(best[row], all_paths(steps, lattice, row), DRAFTS)


@pytest.mark.parametrize(
    "engine, alpha, slope", [("viterbi", 0.2, 0.9), ("device", 1.5, -1.0)]
)
def test_the_weight_follows_each_heads_entropy(engine, alpha, slope):
    model = ngram_model(3)
    lattice = random_lattice(3, batch=3, length=LENGTH, width=WIDTH)
    entropies = np.random.default_rng(1).uniform(0, 2, (3, LENGTH)).astype(np.float32)
    lattice = dataclasses.replace(lattice, entropies=entropies)
    view = random_view(lattice, 4)
    context = np.asarray(view.last_tokens(1))
    if engine == "device":
        refiner = NGramRefiner.from_model(model, alpha, slope=slope)
        [best] = grow(refiner, view, ExactBest(DRAFTS))
    else:
        pytest.importorskip("numba")
        engine = ViterbiEngine(model, alpha, alpha_slope=slope)
        best = engine.refine(lattice, context, DRAFTS).tokens
    differs = False
    for row in range(3):
        text = whole_text(view, row)
        scores, constant = (
            all_paths(naive_steps(text, lattice, row, model, *weight), lattice, row)
            for weight in ((alpha, slope), (alpha,))
        )
        assert_best(best[row], scores, DRAFTS)
        differs |= max(constant, key=constant.get) != max(scores, key=scores.get)
    assert differs


def test_a_weight_is_never_negative():
    weight = Weight.of(0.5, -1.0)
    weights = weight.at(np.array([[0.0, 0.2, 2.0]], np.float32))
    np.testing.assert_allclose(weights, [[0.3, 0.0]], rtol=1e-6)


def test_mixture_of_improbable_tokens_is_finite():
    log_probs = jnp.full((1, 1, 1, 2), -1000.0)
    result = mixed(log_probs, jnp.array([[[[0.0, 3.0, 3.0]]]]))
    np.testing.assert_allclose(
        result, [[[[-1000 - np.log(4), np.log(0.75)]]]], rtol=1e-6
    )
    untouched = mixed(log_probs, jnp.zeros((1, 1, 1, 3)))
    np.testing.assert_allclose(untouched, log_probs, rtol=1e-6)
    impossible = mixed(
        jnp.full((1, 1, 1, 2), -jnp.inf), jnp.array([[[[0.0, 1.0, 1.0]]]])
    )
    np.testing.assert_allclose(impossible, [[[[-np.inf, np.log(0.5)]]]], rtol=1e-6)
