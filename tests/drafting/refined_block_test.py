"""A tree over a block that was refined once, against a naive Algorithm 2."""

import jax
import numpy as np
import pytest

from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.neural import NeuralRefiner
from bpd_jax.drafting.refiners.ngram import NGramRefiner
from bpd_jax.drafting.refiners.weights import Weight, WeightedParams
from bpd_jax.drafting.searches.beam_search import BeamSearch
from bpd_jax.drafting.searches.static import StaticTree, Topology
from bpd_jax.drafting.small_lm import SmallLM
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz

LENGTH, WIDTH = 4, 3
TREE = Topology.of(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0)]
)
GREEDY_PATH = [0, 1, 4, 7]


@pytest.fixture(scope="module")
def base(make_model):
    return make_model(0, block_size=LENGTH)


@pytest.fixture(scope="module")
def small(make_model):
    return make_model(3)


@pytest.fixture(scope="module")
def ngram():
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 13, 60).astype(np.int32) for _ in range(10)]
    return estimate_katz(count_ngrams(texts, order=3, vocab_size=13, end_of_text=0))


@pytest.fixture(params=["neural", "ngram", "both"])
def refined(request, base, small, ngram, slow_read):
    """Paths under refiners, and a naive function for the same scores."""
    with_neural, with_ngram = (
        request.param in (name, "both") for name in ("neural", "ngram")
    )
    functions, params = small
    arrays = WeightedParams(Weight.of(8.0), params)
    neural = NeuralRefiner(SmallLM(functions, LENGTH), arrays)
    paths = Paths(
        HeadsSource(LENGTH, WIDTH),
        (NGramRefiner.from_model(ngram, 3.0),) if with_ngram else (),
        (neural,) if with_neural else (),
    )

    def scores(text, tokens):
        total = np.zeros(len(tokens))
        if with_neural:
            total += 8.0 * slow_read(small, text)[tokens]
        if with_ngram:
            log_probs = [ngram.log_prob(text[-2:], int(token)) for token in tokens]
            total += 3.0 * np.array(log_probs)
        return total

    return paths, scores


def test_all_paths_take_the_ranks_of_the_greedy_path(
    base, make_view, whole_text, grow_drafts, refined
):
    paths, scores = refined
    for seed in (1, 2):
        view = make_view(base, seed=seed)
        lattice = jax.device_get(
            view.model.lattice(view.hidden, view.next_token, LENGTH, WIDTH)
        )
        greedy, by_path, block = grow_drafts(
            paths, view, BeamSearch(1), StaticTree(TREE), StaticTree(TREE, None, True)
        )
        for row in range(3):
            text, ranked = whole_text(view, row), []
            for position in range(1, LENGTH):
                tokens = lattice.tokens[row, position]
                position_scores = lattice.log_probs[row, position] + scores(
                    text, tokens
                )
                ranked.append([int(tokens[i]) for i in np.argsort(-position_scores)])
                text = [*text, ranked[-1][0]]
            want = [ranked[len(node) - 1][node[-1]] for node in TREE.choices]
            assert block.tokens[row, 1:].tolist() == want
            # Both trees contain the draft of Algorithm 2.
            assert (
                block.tokens[row, GREEDY_PATH].tolist() == greedy.tokens[row].tolist()
            )
            assert (
                by_path.tokens[row, GREEDY_PATH].tolist() == greedy.tokens[row].tolist()
            )
        assert block.parents.tolist() == by_path.parents.tolist()
        # Scores that depend on the path rank other paths differently.
        assert block.tokens.tolist() != by_path.tokens.tolist()
