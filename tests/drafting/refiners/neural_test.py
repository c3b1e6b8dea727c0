"""Rescoring by a small LM against Algorithm 2 as printed, without a cache."""

import numpy as np
import pytest

from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.neural import (
    NeuralRefiner,
    ParallelNeuralRefiner,
)
from bpd_jax.drafting.refiners.ngram import NGramRefiner
from bpd_jax.drafting.refiners.weights import Weight, WeightedParams
from bpd_jax.drafting.searches.beam_search import BeamSearch
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.small_lm import SmallLM
from bpd_jax.drafting.sources.heads import HeadsSource
from tests.decoding.random_models import make_ngram
from tests.drafting.naive import (
    LENGTH,
    WIDTH,
    check_every_search,
    grow_drafts,
    lattice_of,
    make_model,
    make_view,
    slow_read,
    whole_text,
)


@pytest.fixture(scope="module")
def base():
    return make_model(0, block_size=LENGTH)


@pytest.fixture(scope="module")
def small():
    return make_model(3)


def sequential(small, weight, ngram=None):
    params = small.params
    neural = NeuralRefiner(SmallLM(small.sizes, LENGTH), WeightedParams(weight, params))
    finite = () if ngram is None else (ngram,)
    return Paths(HeadsSource(LENGTH, WIDTH), finite, (neural,))


def parallel(small, weight):
    params = small.params
    reader = SmallLM(small.sizes, LENGTH)
    neural = ParallelNeuralRefiner(reader, WeightedParams(weight, params))
    return Paths(HeadsSource(LENGTH, WIDTH), (neural,))


def algorithm_2(lattice, row, text, alphas, log_r):
    """For j = 2 … L: z_j + α log r_j over the candidates, then the argmax."""
    draft = []
    for j in range(1, LENGTH):
        tokens = lattice.tokens[row, j]
        r = log_r([*text, *draft])[tokens]
        draft.append(int(tokens[np.argmax(lattice.log_probs[row, j] + alphas[j] * r)]))
    return draft


@pytest.mark.parametrize("alpha, slope", [(0.0, 0.0), (1.0, 0.0), (0.3, 0.4)])
def test_greedy_walk_is_algorithm_2(base, small, alpha, slope):
    view = make_view(base)
    lattice = lattice_of(view)
    [tree] = grow_drafts(
        sequential(small, Weight.of(alpha, slope)), view, BeamSearch(1)
    )
    for row in range(3):
        text = whole_text(view, row)
        alphas = np.maximum(alpha + slope * lattice.entropies[row], 0)
        want = algorithm_2(
            lattice, row, text, alphas, lambda text: slow_read(small, text)
        )
        assert tree.tokens[row].tolist() == [text[-1], *want]
        if alpha == 0:
            assert want == lattice.tokens[row, 1:, 0].tolist()


def test_neural_and_ngram_scores_add_up(base, small):
    ngram = make_ngram()
    view = make_view(base, seed=2)
    lattice = lattice_of(view)

    def offer(row, path):
        text = [*whole_text(view, row), *path]
        tokens = lattice.tokens[row, 1 + len(path)]
        scores = lattice.log_probs[row, 1 + len(path)].copy()
        scores += 0.7 * slow_read(small, text)[tokens]
        scores += 0.4 * np.array([ngram.log_prob(text[-2:], int(t)) for t in tokens])
        return tokens, scores

    beta = NGramRefiner.from_model(ngram, 0.4)
    check_every_search(sequential(small, Weight.of(0.7), beta), view, offer)


def test_parallel_variant_reads_the_unrefined_draft_once(base, small):
    view = make_view(base, seed=3)
    lattice = lattice_of(view)

    def offer(row, path):
        unrefined = lattice.tokens[row, 1 : 1 + len(path), 0]
        tokens = lattice.tokens[row, 1 + len(path)]
        scores = slow_read(small, [*whole_text(view, row), *unrefined])[tokens]
        return tokens, lattice.log_probs[row, 1 + len(path)] + 1.5 * scores

    paths = parallel(small, Weight.of(1.5))
    check_every_search(paths, view, offer)
    # Independent positions: a beam is exact, and so the exact search finds the same.
    beam, exact = grow_drafts(paths, view, BeamSearch(5), ExactBest(5))
    np.testing.assert_array_equal(beam.tokens, exact.tokens)


def test_models_of_one_shape_share_compiled_code(small):
    """Parameters and weights are arguments, so they do not tell path models apart."""
    other_model = make_model(4)
    assert parallel(small, Weight.of(1.0)) == parallel(other_model, Weight.of(2.0))
    assert sequential(small, Weight.of(1.0)) == sequential(other_model, Weight.of(2.0))
    assert hash(parallel(small, Weight.of(1.0))) == hash(
        parallel(other_model, Weight.of(2.0))
    )
