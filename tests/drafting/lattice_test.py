"""Lattices, and the exact searches over them, against brute force."""

import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest

from bpd_jax.drafting.lattice import best_drafts, build_lattice
from bpd_jax.drafting.refiners.markov import MarkovRefiner
from bpd_jax.drafting.refiners.transitions import (
    Weight,
    WeightedParams,
    between_candidates,
)
from bpd_jax.drafting.searches.best import best_paths
from bpd_jax.drafting.searches.cover import covering_drafts
from bpd_jax.models.candidates import top_candidates
from tests.drafting.naive import (
    all_paths,
    assert_best,
    naive_steps,
    path_tokens,
    random_lattice,
)


def lattice_of_logits(seed, batch=2, length=4, width=3, vocab=7):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(batch, length, vocab)).astype(np.float32)
    first = np.array([5, 2][:batch], np.int32)
    return jax.device_get(_built(first, logits[:, 1:], width)), logits


@functools.partial(jax.jit, static_argnums=2)
def _built(first, logits, width):
    return build_lattice(first, *top_candidates(logits, width))


def test_lattice_holds_the_best_tokens_with_their_log_probabilities():
    lattice, logits = lattice_of_logits(0)
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
    # Of the whole vocabulary.
    entropies = -(np.exp(log_probs) * log_probs).sum(-1)
    assert lattice.entropies[:, 0].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(lattice.entropies[:, 1:], entropies[:, 1:], rtol=1e-5)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("count", [1, 4, 27, 40])
def test_best_drafts_equal_brute_force(seed, count):
    lattice, _ = lattice_of_logits(seed)
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


def cover(lattice, transitions, count, temperature=1.0):
    search = jax.jit(covering_drafts, static_argnums=(2, 3))
    return jax.device_get(search(lattice, transitions, count, temperature))


def prefix_probabilities(lattice, scores, row, temperature):
    """q of every prefix of drafted tokens, as a tuple of candidates."""
    heads, width = lattice.log_probs[row], lattice.tokens.shape[2]
    found = {(): 1.0}
    for length in range(1, lattice.tokens.shape[1]):
        for prefix in itertools.product(range(width), repeat=length - 1):
            node = prefix[-1] if prefix else 0
            summed = heads[length] + scores[row, length - 1, node]
            steps = np.exp(summed / temperature)
            steps *= np.exp(heads[length]).sum() / steps.sum()
            for pick in range(width):
                found[(*prefix, pick)] = found[prefix] * steps[pick]
    return found


def expected_tokens(paths, probabilities):
    """Σ of the probabilities of the distinct prefixes, the certain token included."""
    prefixes = {path[:n] for path in paths for n in range(len(path) + 1)}
    return sum(probabilities[prefix] for prefix in prefixes)


@pytest.mark.parametrize("refined", [False, True])
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_no_other_drafts_have_more_expected_tokens(refined, count):
    lattice = random_lattice(seed=count, batch=3, length=4, width=3)
    # Probabilities over the candidates: less than 1 in total.
    lattice = lattice.replace(log_probs=lattice.log_probs - np.float32(2))
    temperature = 0.5 + count / 2
    scores = np.zeros((3, 3, 3, 3), np.float32)
    if refined:
        scores = np.random.default_rng(count).normal(size=scores.shape)
    transitions = between_candidates(np.float32(scores)) if refined else None
    drafts = cover(lattice, transitions, count, temperature)
    for row in range(3):
        probabilities = prefix_probabilities(lattice, scores, row, temperature)
        columns = [list(column) for column in lattice.tokens[row]]
        found = [
            tuple(columns[at].index(path[at]) for at in range(1, 4))
            for path in drafts.tokens[row]
        ]
        all_paths = list(itertools.product(range(3), repeat=3))
        best = max(
            expected_tokens(paths, probabilities)
            for paths in itertools.combinations(all_paths, count)
        )
        assert len(set(found)) == count
        assert expected_tokens(found, probabilities) == pytest.approx(best, rel=1e-5)
        # The scores are what each draft adds.
        assert np.exp(drafts.scores[row]).sum() == pytest.approx(best, rel=1e-5)
        assert (np.diff(drafts.scores[row]) <= 1e-6).all()


def test_drafts_that_add_nothing_are_unused():
    lattice = random_lattice(seed=0, batch=1, length=3, width=2)
    log_probs = np.array(lattice.log_probs)
    log_probs[0, 1:] = [0.0, -np.inf]
    drafts = cover(lattice.replace(log_probs=log_probs), None, 4)
    assert np.isfinite(drafts.scores[0]).tolist() == [True, False, False, False]


def test_a_block_of_the_certain_token_has_one_draft():
    lattice = random_lattice(seed=0, batch=2, length=1)
    drafts = cover(lattice, None, 3)
    assert (drafts.tokens[:, :, 0] == lattice.tokens[:, 0, :1]).all()
    assert np.isfinite(drafts.scores).tolist() == [[True, False, False]] * 2


VOCAB, LENGTH, WIDTH, RANK = 8, 5, 3, 4


@pytest.mark.parametrize("seed, slope", [(0, 0.0), (1, 0.5)])
def test_p_best_are_the_best_of_all_paths(seed, slope):
    rng = np.random.default_rng(seed)
    lattice = dataclasses.replace(
        random_lattice(seed, length=LENGTH, width=WIDTH),
        entropies=rng.exponential(1, (2, LENGTH)).astype(np.float32),
    )
    params = {
        "embedding": rng.normal(size=(VOCAB, RANK)),
        "scale": rng.normal(size=(LENGTH - 1, RANK)),
        "output": rng.normal(size=(VOCAB, RANK)),
    }

    def steps(row, picks):
        level = len(picks) + 1
        previous = path_tokens(lattice, row, picks)[-1]
        bigrams = params["output"][lattice.tokens[row, level]] @ (
            params["scale"][level - 1] * params["embedding"][previous]
        )
        alpha = 0.8 + slope * lattice.entropies[row, level]
        return lattice.log_probs[row, level] + alpha * bigrams

    arrays = jax.tree.map(np.float32, params)
    refiner = MarkovRefiner(WeightedParams(Weight.of(0.8, slope), arrays))

    @jax.jit
    def search(arrays, lattice):
        return best_paths(lattice, refiner.transitions(arrays, lattice, None), 7)

    drafts = jax.device_get(search(refiner.arrays, lattice))
    for row in range(2):
        paths = all_paths(functools.partial(steps, row), lattice, row)
        tokens = drafts.tokens[row]
        assert_best(tokens, paths, 7)
        scores = [paths[tuple(draft)] for draft in tokens.tolist()]
        np.testing.assert_allclose(drafts.scores[row], scores, rtol=1e-4, atol=1e-4)
