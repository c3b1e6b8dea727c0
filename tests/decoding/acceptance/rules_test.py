"""The three rules of acceptance, on small trees."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.decoding.acceptance import (
    longest_match,
    speculative_sampling,
    typical_match,
)
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.draft_tree import DraftTree, NodeOrigins, from_drafts
from bpd_jax.drafting.lattice import Drafts
from tests.drafting import trees_test


def test_random_trees_equal_a_python_loop():
    rng = np.random.default_rng(0)
    for seed in range(10):
        tree = trees_test.random_tree(seed)
        tree.valid[:, 0] = True  # an accepted root
        choices = rng.integers(0, 2, tree.tokens.shape)
        certain = tree.tokens[:, 0]
        accepted = longest_match(tree, choices, certain, trees_test.DEPTH)
        for row, parents in enumerate(tree.parents.tolist()):
            right = []
            for node, parent in enumerate(parents):
                expected = choices[row, parent] if parent >= 0 else certain[row]
                agrees = tree.valid[row, node] and tree.tokens[row, node] == expected
                right.append(agrees and (parent < 0 or right[parent]))
            winner = np.where(right, tree.depths[row], -1).argmax()
            count = tree.depths[row, winner] + 1
            assert accepted.count[row] == count
            assert accepted.rank[row] == tree.ranks[row, winner]
            assert accepted.path[row, count - 1] == winner
            path = accepted.path[row].tolist()
            above = [-1, *path[: count - 1]]
            assert [parents[node] for node in path[:count]] == above
            # Past the accepted part the path goes on along first children.
            for node, following in itertools.pairwise(path[count - 1 :]):
                children = [n for n, p in enumerate(parents) if p == node >= 0]
                children = [n for n in children if tree.valid[row, n]]
                assert following == (children[0] if children else -1)


VOCAB, WIDTH, SIZE, DEPTH = 7, 4, 12, 4
sample = jax.jit(speculative_sampling, static_argnums=3)


def random_tree(rng, drawn):
    """A tree of one root, whose siblings have different tokens; some invalid."""
    parents, depths = [-1], [0]
    while len(parents) < SIZE:
        parent = int(rng.integers(len(parents)))
        if depths[parent] < DEPTH - 1 and parents.count(parent) < WIDTH:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    candidates = np.stack([rng.permutation(VOCAB)[:WIDTH] for _ in range(SIZE)])
    log_probs = np.log(rng.dirichlet(np.full(WIDTH, 0.5), SIZE)).astype(np.float32)
    tokens, valid = [0], [True]
    for node, parent in enumerate(parents[1:], start=1):
        tokens.append(int(candidates[parent, parents[:node].count(parent)]))
        valid.append(valid[parent] and rng.random() < 0.9)
    return DraftTree(
        *(jnp.asarray([x]) for x in (tokens, parents, depths)),
        ranks=jnp.arange(SIZE)[None],
        valid=jnp.asarray([valid]),
        sources=NodeOrigins(jnp.asarray([candidates]), jnp.asarray([log_probs]))
        if drawn
        else None,
    )


def walk(tree, log_probs, key):
    """`speculative_sampling` of the first row, in plain Python."""
    tokens, parents, valid = (
        np.asarray(x)[0] for x in (tree.tokens, tree.parents, tree.valid)
    )
    node, attempts, descended = 0, 0, True
    while descended:
        descended = False
        probs = np.exp(log_probs[node].astype(np.float64))
        children = [n for n in range(SIZE) if parents[n] == node and valid[n]]
        remaining = {}
        if tree.sources is not None:
            candidates = np.asarray(tree.sources.tokens)[0, node].tolist()
            odds = np.exp(np.asarray(tree.sources.log_probs)[0, node].astype(float))
            remaining = dict(zip(candidates, odds, strict=True))
        for child in children:
            token = int(tokens[child])
            source = remaining or {token: 1.0}
            total = sum(source.values())
            source = {name: odds / total for name, odds in source.items()}
            chance = float(jax.random.uniform(jax.random.fold_in(key, attempts)))
            attempts += 1
            if chance * source[token] < probs[token]:
                node, descended = child, True
                break
            for name, odds in source.items():
                probs[name] = max(probs[name] - odds, 0)
            probs /= probs.sum()
            remaining.pop(token, None)
    noise = np.asarray(jax.random.gumbel(jax.random.fold_in(key, attempts), (VOCAB,)))
    with np.errstate(divide="ignore"):
        return node, int(np.argmax(np.log(probs) + noise))


@pytest.mark.parametrize("drawn", [True, False])
def test_sampling_equals_plain_python(drawn):
    rng = np.random.default_rng(0)
    counts = []
    for seed in range(40):
        tree = random_tree(rng, drawn)
        probs = rng.dirichlet(np.full(VOCAB, 0.5), SIZE).astype(np.float32)
        probs[rng.random(probs.shape) < 0.1] = 0
        with np.errstate(divide="ignore"):
            log_probs = np.log(probs / probs.sum(1, keepdims=True))
        key = jax.random.key(seed)
        accepted = sample(tree, jnp.asarray(log_probs)[None], key[None], DEPTH)
        node, following = walk(tree, log_probs, key)
        count = int(accepted.count[0])
        assert int(accepted.path[0, count - 1]) == int(accepted.rank[0]) == node
        assert int(accepted.following[0, count - 1]) == following
        counts.append(count)
    assert set(counts) >= {1, 2, 3}


A, B, C, D = range(4)
# After A the model is fairly sure, after B not at all, after C and D quite sure of A.
PROBS = np.array(
    [[0.70, 0.20, 0.10, 0.0], [0.25, 0.25, 0.25, 0.25], [1, 0, 0, 0], [1, 0, 0, 0]]
)


def options(epsilon, delta):
    return DecodeOptions(
        temperature=1.0,
        acceptance="typical",
        typical_epsilon=epsilon,
        typical_delta=delta,
    )


def accepted(drafts, first, epsilon, delta):
    drafts = jnp.asarray([drafts])
    tree = from_drafts(Drafts(drafts, jnp.zeros(drafts.shape[:2])))
    with np.errstate(divide="ignore"):
        logits = jnp.log(jnp.asarray(PROBS, jnp.float32))[tree.tokens]
    keys = jax.random.key(0)[None]
    settings = options(epsilon, delta)
    result = typical_match(
        tree, logits, jnp.array([first]), keys, settings, drafts.shape[2]
    )
    return int(result.count[0]), int(result.rank[0]), result


# exp(-H) after A is 0.45, after B 0.25.
@pytest.mark.parametrize(
    "draft, epsilon, delta, count",
    [
        ([A, A, B], 0.3, 1.0, 2),  # 0.7 > 0.3, 0.2 < 0.3
        ([A, A, B], 0.19, 1.0, 3),
        ([A, A, C], 0.19, 1.0, 2),
        ([A, A, C], 0.3, 0.2, 3),  # 0.1 > 0.2 · 0.45
        ([A, B, D], 0.3, 0.46, 1),  # 0.2 < 0.3, and 0.2 < 0.46 · 0.45
        ([A, B, D], 0.3, 0.44, 3),  # 0.2 < 0.3, but 0.2 > 0.44 · 0.45
        ([B, D, A], 1.0, 0.9, 3),  # at high entropy, 0.25 suffices
        ([B, D, A], 1.0, 1.0, 1),  # must exceed exp(-H), not equal it
        ([A, D, A], 0.0, 0.0, 1),  # impossible tokens are never typical
        ([A, C, A], 0.0, 0.0, 3),  # all others are then
    ],
)
def test_a_token_must_pass_the_threshold(draft, epsilon, delta, count):
    assert accepted([draft], draft[0], epsilon, delta)[0] == count


def test_the_longest_draft_wins_then_the_better_rank():
    drafts = [[A, C, A], [A, A, A], [A, A, B]]
    count, rank, result = accepted(drafts, A, 0.3, 1.0)
    assert (count, rank) == (3, 1)
    assert result.path.tolist() == [[3, 4, 5]]


def test_the_root_must_be_the_certain_token():
    count, rank, _ = accepted([[B, A, A], [A, A, A]], A, 0.3, 1.0)
    assert (count, rank) == (3, 1)


def test_typical_acceptance_is_lossy():
    assert not options(0.3, 0.09).lossless
    assert DecodeOptions(temperature=1.0, acceptance="speculative").lossless
