"""The Markov head's exact p-best against all paths, one by one."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from bpd_jax.drafting.refiners.markov import MarkovRefiner
from bpd_jax.drafting.refiners.weights import Weight, WeightedParams
from bpd_jax.drafting.searches.finite import best_paths
from tests.drafting.naive import all_paths, assert_best, path_tokens, random_lattice

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
