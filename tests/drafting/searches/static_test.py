"""Static trees against a naive search, their best shape, and sampled children."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
import scipy.stats

from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.neural import NeuralRefiner
from bpd_jax.drafting.refiners.ngram import NGramRefiner
from bpd_jax.drafting.refiners.weights import Weight, WeightedParams
from bpd_jax.drafting.searches.beam_search import BeamSearch
from bpd_jax.drafting.searches.static import (
    StaticTree,
    Topology,
    expected_tree,
    parallel_chains,
)
from bpd_jax.drafting.small_lm import SmallLM
from bpd_jax.drafting.sources.heads import HeadsSource
from tests.decoding.random_models import make_ngram
from tests.drafting.naive import (
    FixedHeads,
    grow_drafts,
    lattice_of,
    make_model,
    make_view,
    naive_steps,
    ngram_model,
    path_tokens,
    random_lattice,
    random_view,
    slow_read,
    whole_text,
)

NODES = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1), (2, 0, 0)]


def test_the_shape_of_a_topology():
    topology = Topology.of(NODES[::-1])
    assert list(topology.choices) == NODES
    assert topology.depth == 4
    assert topology.num_leaves == 5  # 1, 00, 010, 011, 200
    small = topology.within(3, 2)
    assert small.choices == ((0,), (1,), (0, 0), (0, 1))
    assert Topology.of([]).depth == Topology.of([]).num_leaves == 1


@pytest.mark.parametrize("order, length, width", [(None, 4, 3), (3, 3, 2), (3, 1, 3)])
def test_a_static_tree_follows_the_ranks(order, length, width):
    lattice = random_lattice(5, batch=2, length=length, width=width)
    view = random_view(lattice, 5)
    model = None if order is None else ngram_model(order)
    refiners = () if order is None else (NGramRefiner.from_model(model, 0.7),)
    paths = Paths(HeadsSource(length, width), refiners)
    topology = Topology.of(NODES).within(length, width)
    search = StaticTree(Topology.of(NODES))
    [tree] = grow_drafts(paths, view, search)
    assert tree.size == search.max_nodes(length, width) == 1 + len(topology.choices)
    index = {node: i for i, node in enumerate([(), *topology.choices])}
    parents = [-1] + [index[node[:-1]] for node in topology.choices]
    leaves = sum(node not in parents for node in range(tree.size))
    assert leaves == search.max_drafts(length, width)
    for row in range(2):
        steps = naive_steps(whole_text(view, row), lattice, row, model, 0.7)
        tokens = []
        for node in [(), *topology.choices]:
            picks = ()
            for rank in node:
                ranked = np.argsort(-steps(picks), kind="stable")
                picks = (*picks, int(ranked[rank]))
            tokens.append(path_tokens(lattice, row, picks)[-1])
        assert tree.tokens[row].tolist() == tokens
        assert tree.parents[row].tolist() == parents
        assert tree.depths[row].tolist() == [0, *map(len, topology.choices)]
        assert tree.ranks[row].tolist() == list(range(tree.size))
        assert tree.valid[row].all()
    assert tree.sources is None
    assert tree.num_chains == (1 if tree.size == 1 else 0)


def test_descendants_of_impossible_nodes_are_invalid():
    lattice = random_lattice(2, batch=1, length=3, width=2)
    log_probs = lattice.log_probs.copy()
    log_probs[0, 1, 1] = -np.inf
    lattice = Lattice(lattice.tokens, log_probs, lattice.entropies)
    view, paths = random_view(lattice), Paths(HeadsSource(3, 2))
    topology = Topology.of([(0,), (1,), (0, 0), (1, 0)])
    [tree] = grow_drafts(paths, view, StaticTree(topology))
    assert tree.valid.tolist() == [[True, True, False, True, False]]


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


def test_children_are_drawn_without_replacement():
    rows, temperature = 20_000, 0.6
    tokens = np.array([[9, 9, 9, 9], [3, 1, 7, 5], [2, 4, 6, 8]])
    log_probs = np.array(
        [[0, -9, -9, -9], [-0.5, -1.2, -2.0, -np.inf], [-1, -1, -2, -3]]
    )
    lattice = Lattice(
        np.broadcast_to(tokens.astype(np.int32), (rows, 3, 4)),
        np.broadcast_to(log_probs.astype(np.float32), (rows, 3, 4)),
        np.zeros((rows, 3), np.float32),
    )
    topology = Topology.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    paths, search = Paths(HeadsSource(3, 4)), StaticTree(topology, temperature)
    keys = jax.random.split(jax.random.key(1), rows)
    first = lattice.tokens[:, 0, 0]
    view = random_view(jax.tree.map(lambda array: array[:1], lattice))
    arrays = lattice.tokens, lattice.log_probs, lattice.entropies
    heads = FixedHeads(tuple(array[:, 1:] for array in arrays))
    view = dataclasses.replace(view, next_token=first, model=heads)
    [tree] = grow_drafts(paths, view, search, keys=keys)
    assert tree.valid.all()
    for nodes, level in (((1, 2), 1), ((3, 4), 2), ((5,), 2)):
        probs = np.exp(log_probs[level] / temperature)
        probs /= probs.sum()
        order = {token: index for index, token in enumerate(tokens[level])}
        source = int(tree.parents[0, nodes[0]])
        assert (tree.sources.tokens[:, source] == tokens[level]).all()
        known = np.exp(tree.sources.log_probs[0, source])
        np.testing.assert_allclose(known, probs, rtol=1e-5)
        drawn = np.vectorize(order.get)(tree.tokens[:, nodes])
        assert_drawn(drawn[:, 0], probs)
        if len(nodes) == 1:
            continue
        for first_child in np.flatnonzero(probs):
            remaining = np.where(np.arange(4) == first_child, 0.0, probs)
            assert_drawn(
                drawn[drawn[:, 0] == first_child, 1], remaining / remaining.sum()
            )
    # The children of different nodes are drawn independently.
    pairs = tree.tokens[:, 3] * 10 + tree.tokens[:, 5]
    probs = np.exp(log_probs[2] / temperature)
    probs /= probs.sum()
    names = (tokens[2][:, None] * 10 + tokens[2]).reshape(-1)
    number = {name: index for index, name in enumerate(names)}
    assert_drawn(np.vectorize(number.get)(pairs), np.outer(probs, probs).reshape(-1))


def assert_drawn(drawn, probs):
    """A chi-square test, which draws from `probs` fail once in ten thousand times."""
    counts = np.bincount(drawn, minlength=len(probs))
    assert (counts[probs == 0] == 0).all()
    want = probs[probs > 0] * len(drawn)
    assert scipy.stats.chisquare(counts[probs > 0], want).pvalue > 1e-4


def test_parallel_chains_differ_in_their_first_token():
    chains = ((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0))
    assert parallel_chains(2, 3).choices == chains
