"""Beams, exact search and best-first trees against brute force over all prefixes."""

import itertools

import numpy as np
import pytest

from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.ngram import NGramRefiner
from bpd_jax.drafting.searches.beam_search import BeamSearch
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.searches.tree import BestFirst
from bpd_jax.drafting.sources.heads import HeadsSource
from tests.drafting.naive import (
    all_paths,
    assert_best,
    grow_drafts,
    naive_steps,
    ngram_model,
    path_to,
    path_tokens,
    random_lattice,
    random_view,
    whole_text,
)

LENGTH, WIDTH = 4, 3
ORDERS = [None, 3]


@pytest.fixture(scope="module", params=ORDERS)
def scene(request):
    """A lattice under a refiner, a function that runs searches, and the definition."""
    seed = request.param or 0
    lattice = random_lattice(seed, batch=3, length=LENGTH, width=WIDTH)
    view = random_view(lattice, seed)
    model, refiners = None, ()
    if request.param is not None:
        model = ngram_model(request.param)
        refiners = (NGramRefiner.from_model(model, 0.7),)
    paths = Paths(HeadsSource(LENGTH, WIDTH), refiners)

    def grow(search):
        return grow_drafts(paths, view, search)[0]

    steps = [
        naive_steps(whole_text(view, row), lattice, row, model, 0.7) for row in range(3)
    ]
    return lattice, grow, steps


def chains_of(tree, row):
    """The valid chains of a row."""
    tokens = tree.tokens[row].reshape(-1, LENGTH)
    return tokens[tree.valid[row].reshape(-1, LENGTH)[:, 0]]


def beam(steps, count):
    """Textbook beam search."""
    paths = [((), 0.0)]
    for _ in range(LENGTH - 1):
        longer = [
            ((*picks, w), score + step)
            for picks, score in paths
            for w, step in enumerate(steps(picks))
        ]
        paths = sorted(longer, key=lambda path: -path[1])[:count]
    return [picks for picks, _ in paths]


@pytest.mark.parametrize("count", [1, 4])
def test_beam_search_equals_a_naive_one(scene, count):
    lattice, grow, steps = scene
    tree = grow(BeamSearch(count))
    for row in range(3):
        want = [path_tokens(lattice, row, picks) for picks in beam(steps[row], count)]
        assert [tuple(chain) for chain in chains_of(tree, row).tolist()] == want


@pytest.mark.parametrize("search", [BeamSearch(40), ExactBest(40)])
def test_large_searches_return_all_paths_in_order(scene, search):
    lattice, grow, steps = scene
    tree = grow(search)
    assert tree.num_chains == WIDTH ** (LENGTH - 1) == search.max_drafts(LENGTH, WIDTH)
    for row in range(3):
        assert_best(chains_of(tree, row), all_paths(steps[row], lattice, row), 27)


def prefix_scores(steps):
    """All prefixes with their log-probabilities."""
    scores = {(): 0.0}
    for length in range(1, LENGTH):
        for picks in itertools.product(range(WIDTH), repeat=length):
            step = steps(picks[:-1])
            step = step - np.log(np.exp(step).sum())
            scores[picks] = scores[picks[:-1]] + step[picks[-1]]
    return scores


@pytest.mark.parametrize("count", [1, 9, 60])
def test_best_first_takes_the_most_probable_prefixes(scene, count):
    lattice, grow, steps = scene
    search = BestFirst(count)
    tree = grow(search)
    size = search.max_nodes(LENGTH, WIDTH)
    assert tree.size == size == min(count, 40)
    for row in range(3):
        scores = prefix_scores(steps[row])
        want = sorted(scores, key=lambda picks: -scores[picks])[:size]
        assert tree.valid[row].all()
        by_rank = [None] * size
        for node in range(size):
            path = path_to(tree, row, node)
            assert tree.parents[row, node] < node
            assert len(path) == tree.depths[row, node] + 1
            by_rank[tree.ranks[row, node]] = path
        # Ranks follow the order of probabilities.
        assert by_rank == [path_tokens(lattice, row, picks) for picks in want]
    leaves = [
        len(set(range(size)) - set(tree.parents[row].tolist())) for row in range(3)
    ]
    assert max(leaves) <= search.max_drafts(LENGTH, WIDTH)


@pytest.mark.parametrize("min_prob", [0.02, 0.2])
def test_improbable_prefixes_are_left_out_of_a_tree(scene, min_prob):
    _, grow, steps = scene
    tree = grow(BestFirst(30, min_prob))
    assert BestFirst(30, min_prob).pass_sizes(LENGTH, WIDTH) == (8, 15, tree.size)
    for row in range(3):
        probable = [
            score
            for score in prefix_scores(steps[row]).values()
            if score > np.log(min_prob)
        ]
        count = min(len(probable), 30)
        assert 1 < count < 30 or min_prob < 0.1
        np.testing.assert_array_equal(tree.valid[row], np.arange(30) < count)
        assert (tree.parents[row, 1:count] < np.arange(1, count)).all()
        assert sorted(tree.ranks[row, :count].tolist()) == list(range(count))
        if row:
            continue
        # The remaining nodes are the tree of that size.
        smaller = grow(BestFirst(count))
        for name in ("tokens", "parents", "depths", "ranks"):
            values = getattr(tree, name)[row, :count]
            np.testing.assert_array_equal(values, getattr(smaller, name)[row], name)


def test_repeated_and_impossible_candidates_are_left_out():
    lattice = random_lattice(1, batch=1, length=3)
    tokens, log_probs = lattice.tokens.copy(), lattice.log_probs.copy()
    tokens[0, 1, 2] = tokens[0, 1, 0]
    log_probs[0, 2, 1] = -np.inf
    lattice = type(lattice)(tokens, log_probs, lattice.entropies)
    view = random_view(lattice)
    paths = Paths(HeadsSource(3, 3))
    tree, chains = grow_drafts(paths, view, BestFirst(13), BeamSearch(9))
    # The certain token, two after it, and two after each of these.
    assert int(tree.valid.sum()) == 1 + 2 + 4
    assert int(chains.valid.sum()) == 4 * 3


def test_undefined_scores_leave_the_certain_token_of_a_tree():
    """In the first row of a batch; the other row has the tree of defined scores."""
    lattice = random_lattice(1, batch=2, length=3)
    view = random_view(lattice)
    paths = Paths(HeadsSource(3, 3))
    [want] = grow_drafts(paths, view, BestFirst(4))
    lattice.log_probs[0, 1:] = np.nan
    [tree] = grow_drafts(paths, view, BestFirst(4))
    np.testing.assert_array_equal(tree.valid[0], [True, False, False, False])
    assert tree.tokens[0, 0] == lattice.tokens[0, 0, 0]
    for name in ("tokens", "parents", "depths", "ranks", "valid"):
        np.testing.assert_array_equal(getattr(tree, name)[1], getattr(want, name)[1])
