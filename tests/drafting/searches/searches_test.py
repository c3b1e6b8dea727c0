"""Beams, best-first and static trees against brute force over all prefixes."""

import itertools
import math

import numpy as np
import pytest

from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.neural import NeuralRefiner
from bpd_jax.drafting.refiners.ngram import NGramRefiner
from bpd_jax.drafting.refiners.transitions import Weight, WeightedParams
from bpd_jax.drafting.searches.beam_search import BeamSearch
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.searches.static import (
    StaticTree,
    Topology,
    expected_tree,
    parallel_chains,
)
from bpd_jax.drafting.searches.tree import BestFirst
from bpd_jax.drafting.small_lm import SmallLM
from bpd_jax.drafting.sources.heads import HeadsSource
from tests.decoding.random_models import make_ngram
from tests.drafting.naive import (
    all_paths,
    assert_best,
    grow_drafts,
    lattice_of,
    make_model,
    make_view,
    naive_steps,
    ngram_model,
    path_to,
    random_lattice,
    random_view,
    slow_read,
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


@pytest.mark.parametrize("search", [BeamSearch(40), ExactBest(40)])
def test_large_searches_return_all_paths_in_order(scene, search):
    lattice, grow, steps = scene
    tree = grow(search)
    assert tree.num_chains == WIDTH ** (LENGTH - 1) == search.max_drafts(LENGTH, WIDTH)
    for row in range(3):
        assert_best(chains_of(tree, row), all_paths(steps[row], lattice, row), 27)


def prefix_scores(steps, temperature=1.0):
    """All prefixes with their log-probabilities."""
    scores = {(): 0.0}
    for length in range(1, LENGTH):
        for picks in itertools.product(range(WIDTH), repeat=length):
            step = steps(picks[:-1]) / temperature
            step = step - np.log(np.exp(step).sum())
            scores[picks] = scores[picks[:-1]] + step[picks[-1]]
    return scores


@pytest.mark.parametrize("min_prob, temperature", [(0.02, 1), (0.2, 1), (0.1, 2)])
def test_improbable_prefixes_are_left_out_of_a_tree(scene, min_prob, temperature):
    _, grow, steps = scene
    tree = grow(BestFirst(30, min_prob, temperature))
    assert BestFirst(30, min_prob).pass_sizes(LENGTH, WIDTH) == (8, 15, tree.size)
    for row in range(3):
        probable = [
            score
            for score in prefix_scores(steps[row], temperature).values()
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
        smaller = grow(BestFirst(count, temperature=temperature))
        for name in ("tokens", "parents", "depths", "ranks"):
            values = getattr(tree, name)[row, :count]
            np.testing.assert_array_equal(values, getattr(smaller, name)[row], name)


def test_trees_may_count_the_probability_of_all_candidates():
    """Without refiners q is then the probability of the source itself."""
    lattice = random_lattice(3, batch=1, length=LENGTH, width=WIDTH)
    fall = np.arange(LENGTH, dtype=np.float32)[:, None]
    lattice = lattice.replace(log_probs=lattice.log_probs - fall)
    paths = Paths(HeadsSource(LENGTH, WIDTH))
    [tree] = grow_drafts(paths, random_view(lattice), BestFirst(9, mass=True))
    summed = {(): 0.0}
    for length in range(1, LENGTH):
        for picks in itertools.product(range(WIDTH), repeat=length):
            step = lattice.log_probs[0, length, picks[-1]]
            summed[picks] = summed[picks[:-1]] + step
    want = sorted(summed, key=lambda picks: -summed[picks])[:9]
    tokens = {
        tuple(int(lattice.tokens[0, at + 1, pick]) for at, pick in enumerate(picks))
        for picks in want
    }
    found = {path_to(tree, 0, node)[1:] for node in range(9)}
    assert found == tokens


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


NODES = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1), (2, 0, 0)]


def test_the_shape_of_a_topology():
    topology = Topology.of(NODES[::-1])
    assert list(topology.choices) == NODES
    assert topology.depth == 4
    assert topology.num_leaves == 5  # 1, 00, 010, 011, 200
    small = topology.within(3, 2)
    assert small.choices == ((0,), (1,), (0, 0), (0, 1))
    assert Topology.of([]).depth == Topology.of([]).num_leaves == 1


TREE = Topology.of(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0)]
)
GREEDY_PATH = [0, 1, 4, 7]


@pytest.mark.parametrize("with_neural", [False, True])
def test_a_refined_block_has_the_ranks_of_the_greedy_path(with_neural):
    """Against Algorithm 2, under an n-gram model, alone and with a small LM."""
    base, small = make_model(0, block_size=4), make_model(3)
    ngram = make_ngram()
    arrays = WeightedParams(Weight.of(8.0), small.params)
    neural = NeuralRefiner(SmallLM(small.sizes, 4), arrays)
    paths = Paths(
        HeadsSource(4, 3),
        (NGramRefiner.from_model(ngram, 3.0),),
        (neural,) if with_neural else (),
    )
    for seed in (1, 2):
        view = make_view(base, seed=seed)
        lattice = lattice_of(view)
        greedy, by_path, block = grow_drafts(
            paths, view, BeamSearch(1), StaticTree(TREE), StaticTree(TREE, None, True)
        )
        for row in range(3):
            text, ranked = whole_text(view, row), []
            for position in range(1, 4):
                tokens = lattice.tokens[row, position]
                log_probs = [ngram.log_prob(text[-2:], int(token)) for token in tokens]
                scores = lattice.log_probs[row, position] + 3.0 * np.array(log_probs)
                if with_neural:
                    scores = scores + 8.0 * slow_read(small, text)[tokens]
                ranked.append([int(tokens[i]) for i in np.argsort(-scores)])
                text = [*text, ranked[-1][0]]
            want = [ranked[len(node) - 1][node[-1]] for node in TREE.choices]
            assert block.tokens[row, 1:].tolist() == want
            # Both trees contain the draft of Algorithm 2.
            for tree in (block, by_path):
                path = tree.tokens[row, GREEDY_PATH]
                assert path.tolist() == greedy.tokens[row].tolist()
        assert block.parents.tolist() == by_path.parents.tolist()
        # Scores that depend on the path rank other paths differently.
        assert block.tokens.tolist() != by_path.tokens.tolist()


def every_tree(accuracies, num_nodes):
    """All sets of nodes with their parents, besides the root."""
    nodes = [
        node
        for length in range(1, len(accuracies) + 1)
        for node in itertools.product(*(range(len(r)) for r in accuracies[:length]))
    ]
    for chosen in itertools.combinations(nodes, min(num_nodes - 1, len(nodes))):
        if all(not node[:-1] or node[:-1] in chosen for node in chosen):
            yield chosen


@pytest.mark.parametrize("num_nodes", range(1, 6))
@pytest.mark.parametrize("seed", range(3))
def test_the_expected_tree_is_the_best(num_nodes, seed):
    rng = np.random.default_rng(seed)
    accuracies = tuple(
        tuple(float(a) for a in -np.sort(-rng.dirichlet(np.ones(3)))) for _ in range(2)
    )

    def expected(nodes):
        return sum(
            math.prod(accuracies[j][rank] for j, rank in enumerate(node))
            for node in nodes
        )

    tree = expected_tree(accuracies, num_nodes)
    assert len(tree.choices) == num_nodes - 1
    best = max(expected(nodes) for nodes in every_tree(accuracies, num_nodes))
    assert expected(tree.choices) == pytest.approx(best)


def test_expected_tree_is_no_deeper_than_its_heads():
    tree = expected_tree(((0.5, 0.2), (0.4,)), 100)
    assert tree.choices == ((0,), (1,), (0, 0), (1, 0))
    assert expected_tree((), 4).choices == ()


def test_parallel_chains_differ_in_their_first_token():
    chains = ((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0))
    assert parallel_chains(2, 3).choices == chains
