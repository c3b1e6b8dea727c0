"""Merging against a dictionary of prefixes, unrolling against a walk to the roots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.drafting.draft_tree import DraftTree, from_drafts
from bpd_jax.drafting.lattice import Drafts
from bpd_jax.drafting.merging import merge_prefixes, union, unroll

SIZE, DEPTH = 14, 5
SEEDS = given(seed=st.integers(0, 10_000))
FEW = settings(max_examples=25, deadline=None, derandomize=True)

merge = jax.jit(merge_prefixes, static_argnums=(1, 2))
unrolled = jax.jit(unroll, static_argnums=(1, 2))


def random_tree(seed, size=SIZE):
    """Trees with several roots, repeated prefixes and invalid nodes."""
    rng = np.random.default_rng(seed)
    parents = np.full((2, size), -1, np.int32)
    depths, valid = np.zeros((2, size), np.int32), np.ones((2, size), bool)
    for row, node in np.ndindex(2, size):
        parent = rng.integers(-1, node) if node else -1
        if parent >= 0 and depths[row, parent] < DEPTH - 1:
            parents[row, node] = parent
            depths[row, node] = depths[row, parent] + 1
        above = node == 0 or parents[row, node] < 0 or valid[row, parents[row, node]]
        valid[row, node] = above and rng.random() < 0.9
    arrays = (rng.integers(0, 2, (2, size)), parents, depths)
    ranks = np.argsort(rng.random((2, size)), axis=1)
    arrays = (jnp.asarray(array, jnp.int32) for array in (*arrays, ranks))
    return DraftTree(*arrays, jnp.asarray(valid))


def random_chains(seed, count=5, length=4):
    """Chains of a common root, best first; some of them unused."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2, (2, count, length)).astype(np.int32)
    tokens[:, :, 0] = 7
    scores = np.where(rng.random((2, count)) < 0.2, -np.inf, 0.0)
    return from_drafts(Drafts(tokens, scores))


def prefix_of(tree, row, node):
    prefix = []
    while node >= 0:
        prefix.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tuple(prefix[::-1])


def prefixes(tree, row):
    """Every prefix of the valid nodes with its best rank, in order of appearance."""
    found = {}
    for node in np.flatnonzero(tree.valid[row]):
        prefix = prefix_of(tree, row, node)
        found[prefix] = min(int(tree.ranks[row, node]), found.get(prefix, 10**6))
    return found


def assert_is_merged(merged, tree, most):
    merged, tree = jax.device_get((merged, tree))
    assert merged.num_chains == 0
    for row in range(2):
        want = dict(list(prefixes(tree, row).items())[:most])
        nodes = np.flatnonzero(merged.valid[row])
        assert nodes.tolist() == list(range(len(want)))
        found = {prefix_of(merged, row, n): int(merged.ranks[row, n]) for n in nodes}
        assert list(found.items()) == list(want.items())
        for node in nodes:
            parent = merged.parents[row, node]
            above = -1 if parent < 0 else merged.depths[row, parent]
            assert parent < node
            assert merged.depths[row, node] == above + 1


@FEW
@SEEDS
def test_one_node_stays_of_every_prefix(seed):
    tree = random_tree(seed)
    assert_is_merged(merge(tree, SIZE, DEPTH), tree, SIZE)


@FEW
@SEEDS
def test_chains_become_a_tree_whose_children_stand_by_rank(seed):
    chains = random_chains(seed)
    merged = merge(chains, 16, 4)
    assert_is_merged(merged, chains, 16)
    parents, ranks, valid = jax.device_get((merged.parents, merged.ranks, merged.valid))
    for row, node in np.ndindex(2, 16):
        children = np.flatnonzero((parents[row] == node) & valid[row])
        assert (np.diff(ranks[row, children]) > 0).all()


@pytest.mark.parametrize("most", [1, 6])
@FEW
@SEEDS
def test_what_is_too_much_is_dropped_from_the_end(most, seed):
    tree = random_tree(seed)
    merged = merge(tree, most, DEPTH)
    assert merged.size == most
    assert_is_merged(merged, tree, most)


def test_the_example_of_the_docstring():
    drafts = Drafts(jnp.array([[[1, 2, 3], [1, 2, 4]]]), jnp.zeros((1, 2)))
    merged = merge(from_drafts(drafts), 4, 3)
    assert merged.tokens.tolist() == [[1, 2, 3, 4]]
    assert merged.parents.tolist() == [[-1, 0, 1, 1]]
    assert merged.depths.tolist() == [[0, 1, 2, 2]]
    assert merged.ranks.tolist() == [[0, 0, 0, 1]]
    assert merged.valid.tolist() == [[True] * 4]


@FEW
@SEEDS
def test_unrolled_chains_are_the_paths_to_the_leaves(seed):
    tree = random_tree(seed)
    chains = jax.device_get(unrolled(tree, SIZE, DEPTH))
    nodes, positions = chains.nodes, chains.positions
    parents, valid = np.asarray(tree.parents), np.asarray(tree.valid)
    for row in range(2):
        alive = np.flatnonzero(valid[row])
        leaves = [n for n in alive if not (parents[row] == n)[valid[row]].any()]
        paths = []
        for node in leaves:
            path = []
            while node >= 0:
                path.insert(0, int(node))
                node = parents[row, node]
            paths.append(path + [-1] * (DEPTH - len(path)))
        unused = [[-1] * DEPTH] * (SIZE - len(paths))
        assert nodes[row].tolist() == paths + unused
        assert nodes[row].reshape(-1)[positions[row, alive]].tolist() == alive.tolist()


@FEW
@SEEDS
def test_a_union_holds_the_prefixes_of_both_and_ranks_the_first_before(seed):
    first, second = random_tree(seed), random_chains(seed)
    both = jax.jit(union)(first, second)
    merged = merge(both, both.size, DEPTH)
    assert_is_merged(merged, both, both.size)
    for row in range(2):
        here, other = prefixes(first, row), prefixes(second, row)
        found = prefixes(merged, row)
        assert set(found) == set(here) | set(other)
        # What is in both has the rank that the first gives it.
        assert {prefix: found[prefix] for prefix in here} == here
        behind = int(first.ranks[row].max()) + 1
        new = {prefix: rank + behind for prefix, rank in other.items()}
        assert {p: r for p, r in found.items() if p not in here} == {
            p: r for p, r in new.items() if p not in here
        }


def test_a_merged_tree_unrolls_to_its_chains():
    rng = np.random.default_rng(0)
    tokens = np.unique(rng.integers(0, 3, (6, 4)), axis=0).astype(np.int32)
    tokens[:, 0] = 7
    tokens = np.unique(tokens, axis=0)
    drafts = Drafts(jnp.asarray(tokens[None]), jnp.zeros((1, len(tokens))))
    merged = merge(from_drafts(drafts), tokens.size, 4)
    chains = unroll(merged, len(tokens), 4)
    again = np.asarray(merged.tokens)[0][np.asarray(chains.nodes)[0]]
    assert again.tolist() == tokens.tolist()
    assert (chains.nodes >= 0).all()
