import jax.numpy as jnp
import numpy as np

from bpd_jax.drafting.draft_tree import ancestor_mask, from_drafts
from bpd_jax.drafting.lattice import Drafts


def test_drafts_become_chains():
    drafts = Drafts(jnp.array([[[1, 2, 3], [1, 2, 4]]]), jnp.array([[-1.0, -jnp.inf]]))
    tree = from_drafts(drafts)
    assert tree.tokens.tolist() == [[1, 2, 3, 1, 2, 4]]
    assert tree.parents.tolist() == [[-1, 0, 1, -1, 3, 4]]
    assert tree.depths.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert tree.ranks.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert tree.valid.tolist() == [[True] * 3 + [False] * 3]


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
