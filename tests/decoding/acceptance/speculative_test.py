"""Speculative sampling against plain Python, and cases computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.decoding.acceptance.speculative import speculative_sampling
from bpd_jax.drafting.draft_tree import DraftTree, NodeOrigins

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


def two_nodes(token, sources=None):
    return DraftTree(
        tokens=jnp.array([[0, token]]),
        parents=jnp.array([[-1, 0]]),
        depths=jnp.array([[0, 1]]),
        ranks=jnp.array([[0, 1]]),
        valid=jnp.ones((1, 2), bool),
        sources=sources,
    )


def outcomes(tree, probs, count=400):
    """Whether the second node was accepted, and the token after it or instead of it."""
    with np.errstate(divide="ignore"):
        log_probs = jnp.log(jnp.asarray([[probs, probs]], jnp.float32))
    repeated = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, count, axis=0), (tree, log_probs)
    )
    keys = jax.random.split(jax.random.key(3), count)
    accepted = sample(*repeated, keys, 2)
    is_accepted = np.asarray(accepted.count) == 2
    tokens = np.asarray(accepted.following)[
        np.arange(count), np.asarray(is_accepted, int)
    ]
    return is_accepted, tokens


def drawn_from(probs):
    log_probs = jnp.log(jnp.asarray([[probs] * 2], jnp.float32))
    candidates = jnp.broadcast_to(jnp.arange(len(probs)), log_probs.shape)
    return NodeOrigins(candidates, log_probs)


def test_equal_distributions_never_reject():
    probs = [0.1, 0.2, 0.3, 0.4]
    is_accepted, _ = outcomes(two_nodes(1, drawn_from(probs)), probs)
    assert is_accepted.all()


@pytest.mark.parametrize("sources", [None, drawn_from([0.25] * 4)])
def test_tokens_of_probability_0_are_never_accepted(sources):
    is_accepted, tokens = outcomes(two_nodes(2, sources), [0.5, 0.25, 0.0, 0.25])
    assert not is_accepted.any()
    # The residual distribution: only token 0 exceeds the 0.25 of the source.
    assert set(tokens) == ({0, 1, 3} if sources is None else {0})
