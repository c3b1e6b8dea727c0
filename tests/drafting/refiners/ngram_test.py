"""An n-gram model with the text's own bigrams, and weights that follow the entropy."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.drafting.engines.viterbi import ViterbiEngine
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.ngram import NGramRefiner, cache_counts, mixed
from bpd_jax.drafting.refiners.weights import Weight
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
    "order, end_of_text, adaptive", [(1, 0, False), (2, 0, True), (4, None, False)]
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
    with pytest.raises(UserError, match="alpha is -1"):
        NGramRefiner.from_model(None, -1.0)


@pytest.mark.parametrize("seed", range(2))
def test_bigrams_of_the_text_are_counted(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 4, (3, 24)).astype(np.int32)
    lengths = np.array([23, 9, 1], np.int32)
    candidates = rng.integers(0, 5, (3, 4, 3)).astype(np.int32)
    candidates[:, 0] = candidates[:, 0, :1]
    cached_counts = np.asarray(jax.jit(cache_counts)(candidates, tokens, lengths))
    for row, level, previous in np.ndindex(3, 3, 3):
        text = [*tokens[row, : lengths[row]].tolist(), int(candidates[row, 0, 0])]
        pairs = list(itertools.pairwise(text))
        token = int(candidates[row, level, previous])
        counts = [pairs.count((token, int(w))) for w in candidates[row, level + 1]]
        want = [*counts, text[:-1].count(token)]
        assert cached_counts[row, level, previous].tolist() == want
    assert cached_counts.max() > 1


def test_counts_are_mixed_by_the_formula():
    rng = np.random.default_rng(0)
    log_probs = -rng.exponential(3, (2, 3, 4, 5))
    pairs = rng.integers(0, 3, (2, 3, 4, 5))
    totals = pairs.sum(-1) + rng.integers(0, 2, (2, 3, 4))
    counts = np.concatenate([pairs, totals[..., None]], -1).astype(np.float32)
    trust = totals / (totals + 1)
    share = pairs / np.maximum(totals, 1)[..., None]
    want = np.log((1 - trust[..., None]) * np.exp(log_probs) + trust[..., None] * share)
    result = mixed(jnp.asarray(log_probs, jnp.float32), jnp.asarray(counts))
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)


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
