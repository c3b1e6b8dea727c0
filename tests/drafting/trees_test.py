"""Trees: ancestors, merging, unrolling and unions, against paths to the roots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.drafting.draft_tree import (
    DraftTree,
    ancestor_mask,
    from_drafts,
    merge_prefixes,
    union,
    unroll,
)
from bpd_jax.drafting.interface import Prompts
from bpd_jax.drafting.lattice import Drafts
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.drafting.sources.lookup import PromptLookup
from bpd_jax.drafting.sources.none import PlainDrafter
from bpd_jax.drafting.union import WithLookup
from tests.drafting.naive import (
    path_to,
    prefixes,
    random_lattice,
    random_view,
)


def test_a_node_sees_itself_and_its_ancestors_only():
    rng = np.random.default_rng(0)
    parents = np.array([[rng.integers(-1, i) if i else -1 for i in range(12)]] * 2)
    parents[1] = np.arange(-1, 11)
    mask = np.asarray(ancestor_mask(jnp.asarray(parents), max_depth=12))
    for row in range(2):
        for node in range(12):
            seen = set()
            ancestor = node
            while ancestor >= 0:
                seen.add(ancestor)
                ancestor = parents[row, ancestor]
            assert set(np.flatnonzero(mask[row, node])) == seen


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
    return DraftTree(*(array.astype(np.int32) for array in (*arrays, ranks)), valid)


def random_chains(seed, count=5, length=4):
    """Chains of a common root, best first; some of them unused."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2, (2, count, length)).astype(np.int32)
    tokens[:, :, 0] = 7
    scores = np.where(rng.random((2, count)) < 0.2, -np.inf, 0.0)
    return jax.device_get(from_drafts(Drafts(tokens, scores)))


def assert_is_merged(merged, tree, limit):
    merged, tree = jax.device_get((merged, tree))
    assert merged.num_chains == 0
    for row in range(2):
        want = dict(list(prefixes(tree, row).items())[:limit])
        nodes = np.flatnonzero(merged.valid[row])
        assert nodes.tolist() == list(range(len(want)))
        ranks = {path_to(merged, row, n): int(merged.ranks[row, n]) for n in nodes}
        assert list(ranks.items()) == list(want.items())
        for node in nodes:
            parent = merged.parents[row, node]
            above = -1 if parent < 0 else merged.depths[row, parent]
            assert parent < node
            assert merged.depths[row, node] == above + 1


@FEW
@SEEDS
def test_children_of_merged_chains_are_ordered_by_rank(seed):
    chains = random_chains(seed)
    merged = merge(chains, 16, 4)
    assert_is_merged(merged, chains, 16)
    parents, ranks, valid = jax.device_get((merged.parents, merged.ranks, merged.valid))
    for row, node in np.ndindex(2, 16):
        children = np.flatnonzero((parents[row] == node) & valid[row])
        assert (np.diff(ranks[row, children]) > 0).all()


@pytest.mark.parametrize("limit", [1, 6, SIZE])
@FEW
@SEEDS
def test_merging_keeps_one_node_per_prefix_up_to_the_limit(limit, seed):
    tree = random_tree(seed)
    merged = merge(tree, limit, DEPTH)
    assert merged.size == limit
    assert_is_merged(merged, tree, limit)


@FEW
@SEEDS
def test_unrolled_chains_are_the_paths_to_the_leaves(seed):
    tree = random_tree(seed)
    nodes, positions = jax.device_get(unrolled(tree, SIZE, DEPTH))
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
def test_union_holds_both_trees_and_ranks_the_first_higher(seed):
    first, second = random_tree(seed), random_chains(seed)
    both = jax.device_get(jax.jit(union)(first, second))
    merged = merge(both, both.size, DEPTH)
    assert_is_merged(merged, both, both.size)
    for row in range(2):
        first_ranks, second_ranks = prefixes(first, row), prefixes(second, row)
        merged_ranks = prefixes(merged, row)
        assert set(merged_ranks) == set(first_ranks) | set(second_ranks)
        # Prefixes of both trees have the rank of the first.
        assert {prefix: merged_ranks[prefix] for prefix in first_ranks} == first_ranks
        offset = int(first.ranks[row].max()) + 1
        new = {prefix: rank + offset for prefix, rank in second_ranks.items()}
        assert {p: r for p, r in merged_ranks.items() if p not in first_ranks} == {
            p: r for p, r in new.items() if p not in first_ranks
        }


def test_a_union_has_the_sizes_and_entropies_of_its_parts():
    lattice = random_lattice(0, batch=3)
    view = random_view(lattice)
    first = PathDrafter(Paths(HeadsSource(4, 3)), ExactBest(4))
    drafter = WithLookup(first, PromptLookup(7))
    memory = drafter.start(
        drafter.arrays, Prompts(view.tokens, view.lengths, None, None)
    )

    @jax.jit
    def propose():
        seen, _ = drafter.look(view, drafter.arrays, memory)
        return drafter.propose(seen, drafter.arrays), drafter.entropies(seen)

    tree, entropies = jax.device_get(propose())
    assert tree.size == drafter.max_nodes == first.max_nodes + 7
    assert drafter.max_depth == 8
    np.testing.assert_array_equal(entropies[:, :4], lattice.entropies)
    assert np.isnan(entropies[:, 4:]).all()
    for row in range(3):
        # The certain token is the root of both, and each prefix is one node.
        assert int(tree.valid[row].sum()) == len(prefixes(tree, row))
        assert ((tree.parents[row] < 0) & tree.valid[row]).sum() == 1


def test_without_heads_there_are_no_entropies():
    drafter = WithLookup(PlainDrafter(), PromptLookup(3))
    assert drafter.entropies((jnp.zeros(2), None)) is None
