import functools
import itertools
import re

import jax
import numpy as np
import pytest

from bpd_jax.drafting.lattice import best_drafts, build_lattice
from bpd_jax.models.model import top_candidates
from tests.drafting.naive import all_paths, assert_best, naive_steps


def random_lattice(seed, batch=2, length=4, width=3, vocab=7):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(batch, length, vocab)).astype(np.float32)
    first = np.array([5, 2][:batch], np.int32)
    return jax.device_get(_built(first, logits[:, 1:], width)), logits


@functools.partial(jax.jit, static_argnums=2)
def _built(first, logits, width):
    return build_lattice(first, *top_candidates(logits, width))


def test_lattice_holds_the_best_tokens_with_their_log_probabilities():
    lattice, logits = random_lattice(0)
    assert lattice.tokens[:, 0].tolist() == [[5] * 3, [2] * 3]
    certain = [0.0, -np.inf, -np.inf]
    assert lattice.log_probs[:, 0].tolist() == [certain] * 2
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, position in itertools.product(range(2), range(1, 4)):
        order = np.argsort(-log_probs[row, position])[:3]
        assert lattice.tokens[row, position].tolist() == order.tolist()
        np.testing.assert_allclose(
            lattice.log_probs[row, position],
            log_probs[row, position, order],
            rtol=1e-5,
        )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("count", [1, 4, 27, 40])
def test_best_drafts_equal_brute_force(seed, count):
    lattice, _ = random_lattice(seed)
    search = jax.jit(best_drafts, static_argnums=1)
    drafts = jax.device_get(search(lattice, count))
    for row in range(2):
        paths = all_paths(naive_steps([], lattice, row), lattice, row)
        used = np.isfinite(drafts.scores[row])
        assert used.tolist() == (np.arange(count) < len(paths)).tolist()
        tokens = drafts.tokens[row][used]
        assert_best(tokens, paths, count)
        claimed = [paths[tuple(draft)] for draft in tokens.tolist()]
        np.testing.assert_allclose(drafts.scores[row][used], claimed, rtol=1e-5)


def test_entropies_are_of_the_whole_vocabulary():
    lattice, logits = random_lattice(2)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = -(np.exp(log_probs) * log_probs).sum(-1)
    assert lattice.entropies[:, 0].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(lattice.entropies[:, 1:], want[:, 1:], rtol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA on a CPU")
@pytest.mark.parametrize("count", [1, 16])
def test_the_vocabulary_is_never_sorted(count):
    """Taking columns of the candidates must not make XLA sort all tokens instead."""

    def draft(next_token, logits):
        lattice = build_lattice(next_token, *top_candidates(logits, 16))
        return best_drafts(lattice, count).tokens, lattice.entropies

    shapes = (np.zeros(1, np.int32), np.zeros((1, 8, 4096), np.float32))
    program = jax.jit(draft).lower(*shapes).compile().as_text()
    assert not re.search(r"4096.* sort\(", program)
