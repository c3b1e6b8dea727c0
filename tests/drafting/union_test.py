import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.drafting.engines.host import HostDrafter
from bpd_jax.drafting.engines.viterbi import ViterbiEngine
from bpd_jax.drafting.interface import Prompts
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.drafting.sources.lookup import PromptLookup
from bpd_jax.drafting.sources.none import PlainDrafter
from bpd_jax.drafting.union import UnionDrafter


def prefixes(tree, row):
    found = {}
    for node in np.flatnonzero(tree.valid[row]):
        rank, path = int(tree.ranks[row, node]), []
        while node >= 0:
            path.insert(0, int(tree.tokens[row, node]))
            node = tree.parents[row, node]
        found[tuple(path)] = min(rank, found.get(tuple(path), rank))
    return found


@pytest.mark.parametrize("copied, on_device", [(2, True), (7, False)])
def test_the_common_tree_holds_both_methods_drafts(
    copied, on_device, random_lattice, random_view, ngram_model
):
    lattice = random_lattice(0, batch=3)
    view = random_view(lattice)
    if on_device:
        first = PathDrafter(Paths(HeadsSource(4, 3)), ExactBest(4))
    else:
        pytest.importorskip("numba")
        first = HostDrafter(HeadsSource(4, 3), 4, 1, ViterbiEngine(ngram_model(3)))
    second = PromptLookup(copied)
    both = UnionDrafter(first, second)
    assert both.on_device == on_device
    assert both.max_depth == max(4, copied + 1)
    memory = both.start(both.arrays, Prompts(view.tokens, view.lengths, None))
    seen, _ = jax.jit(lambda: both.look(view, both.arrays, memory))()
    seen = jax.device_get(seen)

    def propose(drafter, seen):
        if not on_device:
            return drafter.propose(seen, None)
        return jax.jit(drafter.propose)(seen, drafter.arrays)

    trees = [propose(first, seen[0]), propose(second, seen[1])]
    tree = propose(both, seen)
    assert tree.size == both.max_nodes == first.max_nodes + copied
    lookups = 0
    for row in range(3):
        here, other = (prefixes(part, row) for part in trees)
        found = prefixes(tree, row)
        assert set(found) == set(here) | set(other)
        assert {prefix: found[prefix] for prefix in here} == here
        assert int(tree.valid[row].sum()) == len(found)
        roots = np.asarray(tree.parents[row]) < 0
        assert (roots & np.asarray(tree.valid[row])).sum() == 1
        lookups += len(other) > 1
    assert lookups
    entropies = np.asarray(both.entropies(seen))
    assert entropies.shape == (3, both.max_depth)
    np.testing.assert_array_equal(entropies[:, :4], lattice.entropies)
    assert np.isnan(entropies[:, 4:]).all()


def test_without_heads_there_are_no_entropies():
    both = UnionDrafter(PlainDrafter(), PromptLookup(3))
    seen = (jnp.zeros(2), None)
    assert both.entropies(seen) is None
