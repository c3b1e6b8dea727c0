"""Covering drafts against brute force over all sets of paths."""

import itertools

import jax
import numpy as np
import pytest

from bpd_jax.drafting.refiners.transitions import between_candidates
from bpd_jax.drafting.searches.cover import covering_drafts
from tests.drafting.naive import random_lattice


def cover(lattice, transitions, count):
    search = jax.jit(covering_drafts, static_argnums=2)
    return jax.device_get(search(lattice, transitions, count))


def prefix_probabilities(lattice, scores, row):
    """q of every prefix of drafted tokens, as a tuple of candidates."""
    heads, width = lattice.log_probs[row], lattice.tokens.shape[2]
    found = {(): 1.0}
    for length in range(1, lattice.tokens.shape[1]):
        for prefix in itertools.product(range(width), repeat=length - 1):
            node = prefix[-1] if prefix else 0
            steps = np.exp(heads[length] + scores[row, length - 1, node])
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
    scores = np.zeros((3, 3, 3, 3), np.float32)
    if refined:
        scores = np.random.default_rng(count).normal(size=scores.shape)
    transitions = between_candidates(np.float32(scores)) if refined else None
    drafts = cover(lattice, transitions, count)
    for row in range(3):
        probabilities = prefix_probabilities(lattice, scores, row)
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
