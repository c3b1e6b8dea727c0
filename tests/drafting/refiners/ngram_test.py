"""An n-gram model with the text's own bigrams, and weights that follow the entropy."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from bpd_jax.drafting.engines.viterbi import ViterbiEngine
from bpd_jax.drafting.interface import Prompts
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.ngram import NGramRefiner
from bpd_jax.drafting.refiners.weights import Weight
from bpd_jax.drafting.searches.beam_search import BeamSearch
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.errors import UserError

LENGTH, WIDTH, DRAFTS = 4, 3, 6


def grow(search, refiner, lattice, view):
    paths = Paths(HeadsSource(LENGTH, WIDTH), (refiner,))

    def run(arrays):
        memory = paths.remember(arrays, Prompts(view.tokens, view.lengths, None))
        state, _ = paths.start(view, arrays, memory)
        return search.grow(paths, arrays, state, view.next_token)

    tree = jax.device_get(jax.jit(run)(paths.arrays))
    return tree.tokens.reshape(len(lattice.tokens), -1, LENGTH)


def all_paths(steps, lattice, row):
    """The score of every path."""
    scored = {}
    for picks in itertools.product(range(WIDTH), repeat=LENGTH - 1):
        score = sum(steps(picks[:j])[pick] for j, pick in enumerate(picks))
        path = [int(lattice.tokens[row, j + 1, w]) for j, w in enumerate(picks)]
        scored[int(lattice.tokens[row, 0, 0]), *path] = score
    return scored


def assert_best(drafts, scores):
    """Checks that drafts are the best of all paths, in order; ties in any order."""
    draft_scores = [scores[tuple(draft)] for draft in drafts.tolist()]
    assert len(set(map(tuple, drafts.tolist()))) == len(draft_scores) == DRAFTS
    want = sorted(scores.values(), reverse=True)[:DRAFTS]
    np.testing.assert_allclose(draft_scores, want, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("order, end_of_text", [(1, 0), (2, 0), (3, None), (4, 0)])
def test_walks_and_exact_search_follow_the_definition(
    order, end_of_text, adaptive, ngram_model, random_lattice, random_view, naive_steps
):
    model = ngram_model(order, end_of_text)
    # Seed 11 has the end of text among the candidates.
    lattice = random_lattice(11, batch=3, length=LENGTH, width=WIDTH)
    assert (lattice.tokens[:, 1:-1] == 0).any()
    view = random_view(lattice, order)
    refiner = NGramRefiner.from_model(model, 0.6, adaptive=adaptive)
    walks = grow(BeamSearch(1), refiner, lattice, view)
    best = grow(ExactBest(DRAFTS), refiner, lattice, view)
    for row in range(3):
        steps = naive_steps(view, lattice, row, model, 0.6, adaptive=adaptive)
        picks = ()
        for _ in range(LENGTH - 1):
            picks = (*picks, int(np.argmax(steps(picks))))
        tokens = [int(lattice.tokens[row, j + 1, w]) for j, w in enumerate(picks)]
        assert walks[row, 0, 1:].tolist() == tokens
        assert_best(best[row], all_paths(steps, lattice, row))


@pytest.mark.parametrize("engine", ["viterbi", "device"])
@pytest.mark.parametrize("alpha, slope", [(0.2, 0.9), (1.5, -1.0)])
def test_the_weight_follows_each_heads_entropy(
    engine, alpha, slope, ngram_model, random_lattice, random_view, naive_steps
):
    model = ngram_model(3)
    lattice = random_lattice(3, batch=3, length=LENGTH, width=WIDTH)
    entropies = np.random.default_rng(1).uniform(0, 2, (3, LENGTH)).astype(np.float32)
    lattice = dataclasses.replace(lattice, entropies=entropies)
    view = random_view(lattice, 4)
    context = np.asarray(view.last_tokens(1))
    if engine == "device":
        refiner = NGramRefiner.from_model(model, alpha, slope=slope)
        best = grow(ExactBest(DRAFTS), refiner, lattice, view)
    else:
        pytest.importorskip("numba")
        engine = ViterbiEngine(model, alpha, alpha_slope=slope)
        best = engine.refine(lattice, context, DRAFTS).tokens
    differs = False
    for row in range(3):
        steps = naive_steps(view, lattice, row, model, alpha, slope)
        scores = all_paths(steps, lattice, row)
        assert_best(best[row], scores)
        constant = all_paths(
            naive_steps(view, lattice, row, model, alpha), lattice, row
        )
        differs |= max(constant, key=constant.get) != max(scores, key=scores.get)
    assert differs


def test_a_weight_is_never_negative():
    weight = Weight.of(0.5, -1.0)
    weights = weight.at(np.array([[0.0, 0.2, 2.0]], np.float32))
    np.testing.assert_allclose(weights, [[0.3, 0.0]], rtol=1e-6)
    with pytest.raises(UserError, match="alpha is -1"):
        NGramRefiner.from_model(None, -1.0)
