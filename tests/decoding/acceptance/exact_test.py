import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.acceptance.exact import longest_match
from bpd_jax.drafting.draft_tree import DraftTree, from_drafts
from bpd_jax.drafting.lattice import Drafts

A, B, C, D, X = range(5)


def test_longest_draft_wins_and_ties_go_to_the_first():
    drafts = Drafts(jnp.array([[[A, B, X], [A, B, C]], [[A, B, X], [A, B, D]]]), None)
    tree = from_drafts(drafts.replace(scores=jnp.zeros((2, 2))))
    choices = jnp.array([[B, C, 9, B, C, 9]] * 2)
    accepted = longest_match(tree, choices, jnp.array([A, A]), 3)
    assert accepted.count.tolist() == [3, 2]
    assert accepted.rank.tolist() == [1, 0]
    assert accepted.path.tolist() == [[3, 4, 5], [0, 1, 2]]


def test_random_trees_equal_a_python_loop():
    rng = np.random.default_rng(0)
    for _ in range(20):
        size, depth_limit = 14, 5
        parents, depths = [-1], [0]
        for node in range(1, size):
            parent = int(rng.integers(-1, node))
            if parent >= 0 and depths[parent] == depth_limit - 1:
                parent = -1
            parents.append(parent)
            depths.append(0 if parent < 0 else depths[parent] + 1)
        tokens = rng.integers(0, 3, size)
        choices = rng.integers(0, 3, size)
        valid = rng.random(size) < 0.9
        tokens[0], valid[0] = 1, True  # an accepted root
        for node in range(1, size):
            valid[node] &= parents[node] < 0 or valid[parents[node]]
        tree = DraftTree(
            *(jnp.asarray([x]) for x in (tokens, parents, depths)),
            ranks=jnp.arange(size)[None],
            valid=jnp.asarray([valid]),
        )
        accepted = longest_match(
            tree, jnp.asarray([choices]), jnp.array([1]), depth_limit
        )

        node_accepted = []
        for node in range(size):
            parent = parents[node]
            expected = 1 if parent < 0 else choices[parent]
            parent_accepted = parent < 0 or node_accepted[parent]
            node_accepted.append(
                bool(valid[node] and parent_accepted and tokens[node] == expected)
            )
        best = max(d for d, r in zip(depths, node_accepted, strict=True) if r)
        winner = next(n for n in range(size) if node_accepted[n] and depths[n] == best)
        assert accepted.count.tolist() == [best + 1]
        assert accepted.rank.tolist() == [winner]
        path = [winner]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        assert accepted.path[0, : best + 1].tolist() == path
        # Past the accepted part the path goes on along first children.
        node = winner
        for following in accepted.path[0, best + 1 :].tolist():
            children = [n for n in range(size) if parents[n] == node and valid[n]]
            node = children[0] if children and node >= 0 else -1
            assert following == node
