"""Static trees against a naive search, their best shape, and drawn children."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from bpd_jax.drafting.interface import Prompts
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.ngram import NGramRefiner
from bpd_jax.drafting.searches.static import StaticTree, Topology, expected_tree
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.errors import UserError

NODES = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1), (2, 0, 0)]


@pytest.mark.parametrize(
    "choices, message",
    [
        ([(0,), (0,)], r"node \[0\] is empty, repeated or negative"),
        ([()], r"node \[\] is empty"),
        ([(0,), (0, -1)], r"node \[0, -1\] is empty, repeated or negative"),
        ([(0,), (1, 0)], r"node \[1, 0\] has no parent"),
        ([(0,), (2,)], r"node \[2\] has no sibling of rank 1"),
        ([(0,), (0, 1)], r"node \[0, 1\] has no sibling of rank 0"),
    ],
)
def test_invalid_topologies_are_refused(choices, message):
    with pytest.raises(UserError, match=message):
        Topology.of(choices)


def test_the_shape_of_a_topology():
    topology = Topology.of(NODES[::-1])
    assert list(topology.choices) == NODES
    assert topology.depth == 4
    assert topology.num_leaves == 5  # 1, 00, 010, 011, 200
    small = topology.within(3, 2)
    assert small.choices == ((0,), (1,), (0, 0), (0, 1))
    assert Topology.of([]).depth == Topology.of([]).num_leaves == 1


@pytest.mark.parametrize("order", [None, 3])
@pytest.mark.parametrize("length, width", [(4, 3), (3, 2), (1, 3)])
def test_a_static_tree_follows_the_ranks(
    order, length, width, random_lattice, random_view, naive_steps, ngram_model
):
    lattice = random_lattice(5, batch=2, length=length, width=width)
    view = random_view(lattice, 5)
    model = None if order is None else ngram_model(order)
    refiners = () if order is None else (NGramRefiner.from_model(model, 0.7),)
    paths = Paths(HeadsSource(length, width), refiners)
    topology = Topology.of(NODES).within(length, width)
    search = StaticTree(Topology.of(NODES))

    def run(arrays):
        memory = paths.remember(arrays, Prompts(view.tokens, view.lengths, None))
        state, _ = paths.start(view, arrays, memory)
        return search.grow(paths, arrays, state, view.next_token)

    tree = jax.device_get(jax.jit(run)(paths.arrays))
    assert tree.size == search.max_nodes(length, width) == 1 + len(topology.choices)
    index = {node: i for i, node in enumerate([(), *topology.choices])}
    parents = [-1] + [index[node[:-1]] for node in topology.choices]
    leaves = sum(node not in parents for node in range(tree.size))
    assert leaves == search.max_drafts(length, width)
    for row in range(2):
        steps = naive_steps(view, lattice, row, model, 0.7)
        tokens = [int(lattice.tokens[row, 0, 0])]
        for node in topology.choices:
            picks = ()
            for rank in node:
                ranked = np.argsort(-steps(picks), kind="stable")
                picks = (*picks, int(ranked[rank]))
            tokens.append(int(lattice.tokens[row, len(node), picks[-1]]))
        assert tree.tokens[row].tolist() == tokens
        assert tree.parents[row].tolist() == parents
        assert tree.depths[row].tolist() == [0, *map(len, topology.choices)]
        assert tree.ranks[row].tolist() == list(range(tree.size))
        assert tree.valid[row].all()
    assert tree.sources is None
    assert tree.num_chains == (1 if tree.size == 1 else 0)


def test_descendants_of_impossible_nodes_are_invalid(random_lattice, random_view):
    lattice = random_lattice(2, batch=1, length=3, width=2)
    log_probs = lattice.log_probs.copy()
    log_probs[0, 1, 1] = -np.inf
    lattice = Lattice(lattice.tokens, log_probs, lattice.entropies)
    view, paths = random_view(lattice), Paths(HeadsSource(3, 2))
    arrays = paths.arrays
    memory = paths.remember(arrays, Prompts(view.tokens, view.lengths, None))
    state, _ = paths.start(view, arrays, memory)
    topology = Topology.of([(0,), (1,), (0, 0), (1, 0)])
    tree = StaticTree(topology).grow(paths, arrays, state, view.next_token)
    assert tree.valid.tolist() == [[True, True, False, True, False]]


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


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_children_are_drawn_without_replacement(temperature, random_view):
    rows = 20_000
    tokens = np.array([[9, 9, 9, 9], [3, 1, 7, 5], [2, 4, 6, 8]])
    log_probs = np.array(
        [[0, -9, -9, -9], [-0.5, -1.2, -2.0, -np.inf], [-1, -1, -2, -3]]
    )
    lattice = Lattice(
        jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (rows, 3, 4)),
        jnp.broadcast_to(jnp.asarray(log_probs, jnp.float32), (rows, 3, 4)),
        jnp.zeros((rows, 3)),
    )
    topology = Topology.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    paths, search = Paths(HeadsSource(3, 4)), StaticTree(topology, temperature)
    keys = jax.random.split(jax.random.key(1), rows)
    first = lattice.tokens[:, 0, 0]
    view = random_view(jax.tree.map(lambda array: array[:1], lattice))
    view.model.lattice = lambda *_: lattice
    view = dataclasses.replace(view, next_token=first)

    @jax.jit
    def run():
        memory = paths.remember(paths.arrays, Prompts(view.tokens, view.lengths, None))
        state, _ = paths.start(view, paths.arrays, memory)
        return search.grow(paths, paths.arrays, state, first, keys)

    tree = jax.device_get(run())
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
