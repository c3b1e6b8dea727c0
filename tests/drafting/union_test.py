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
from tests.drafting.naive import ngram_model, prefixes, random_lattice, random_view


@pytest.mark.parametrize("copied, on_device", [(2, True), (7, False)])
def test_union_holds_the_drafts_of_both(copied, on_device):
    lattice = random_lattice(0, batch=3)
    view = random_view(lattice)
    if on_device:
        first = PathDrafter(Paths(HeadsSource(4, 3)), ExactBest(4))
    else:
        pytest.importorskip("numba")
        first = HostDrafter(HeadsSource(4, 3), 4, 1, ViterbiEngine(ngram_model(3)))
    second = PromptLookup(copied)
    union = UnionDrafter(first, second)
    assert union.on_device == on_device
    assert union.max_depth == max(4, copied + 1)
    memory = union.start(union.arrays, Prompts(view.tokens, view.lengths, None, None))
    seen, _ = jax.jit(lambda: union.look(view, union.arrays, memory))()
    seen = jax.device_get(seen)

    def propose(drafter, seen):
        if not on_device:
            return drafter.propose(seen, None)
        return jax.jit(drafter.propose)(seen, drafter.arrays)

    trees = [propose(first, seen[0]), propose(second, seen[1])]
    tree = propose(union, seen)
    assert tree.size == union.max_nodes == first.max_nodes + copied
    lookups = 0
    for row in range(3):
        first_ranks, second_ranks = (prefixes(part, row) for part in trees)
        union_ranks = prefixes(tree, row)
        assert set(union_ranks) == set(first_ranks) | set(second_ranks)
        assert {prefix: union_ranks[prefix] for prefix in first_ranks} == first_ranks
        assert int(tree.valid[row].sum()) == len(union_ranks)
        roots = np.asarray(tree.parents[row]) < 0
        assert (roots & np.asarray(tree.valid[row])).sum() == 1
        lookups += len(second_ranks) > 1
    assert lookups
    entropies = np.asarray(union.entropies(seen))
    assert entropies.shape == (3, union.max_depth)
    np.testing.assert_array_equal(entropies[:, :4], lattice.entropies)
    assert np.isnan(entropies[:, 4:]).all()


def test_without_heads_there_are_no_entropies():
    union = UnionDrafter(PlainDrafter(), PromptLookup(3))
    seen = (jnp.zeros(2), None)
    assert union.entropies(seen) is None
