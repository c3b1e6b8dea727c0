"""Small language models and trained heads along a path, against slow definitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.drafting import small_lm
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.neural import (
    NeuralRefiner,
    ParallelNeuralRefiner,
)
from bpd_jax.drafting.refiners.ngram import NGramRefiner
from bpd_jax.drafting.refiners.transitions import Weight, WeightedParams
from bpd_jax.drafting.searches.beam_search import BeamSearch
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.small_lm import SmallLM
from bpd_jax.drafting.sources.draft_model import DraftModelSource
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
    slow_values,
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


def test_neural_and_ngram_scores_add_up(base, small):
    ngram = make_ngram()
    view = make_view(base, seed=2)
    lattice = lattice_of(view)

    def offer(row, path):
        text = [*whole_text(view, row), *path]
        tokens = lattice.tokens[row, 1 + len(path)]
        scores = lattice.log_probs[row, 1 + len(path)].copy()
        alpha = 0.7 + 0.4 * lattice.entropies[row, 1 + len(path)]
        scores += alpha * slow_read(small, text)[tokens]
        scores += 0.4 * np.array([ngram.log_prob(text[-2:], int(t)) for t in tokens])
        return tokens, scores

    beta = NGramRefiner.from_model(ngram, 0.4)
    check_every_search(sequential(small, Weight.of(0.7, 0.4), beta), view, offer)


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


def test_every_search_grows_the_draft_models_continuations():
    small = make_model(3)
    view = make_view(make_model(0))

    def offer(row, path):
        log_probs = slow_read(small, [*whole_text(view, row), *path])
        tokens = np.argsort(-log_probs)[:WIDTH]
        return tokens, log_probs[tokens]

    source = DraftModelSource(LENGTH, WIDTH, SmallLM(small.sizes, LENGTH), small.params)
    check_every_search(Paths(source), view, offer)


REACH = 4


@pytest.fixture(scope="module")
def model():
    return make_model(3, num_layers=2)


@pytest.fixture(scope="module")
def assert_read(model):
    """Checks the values of a text in a row of a cache."""

    def check(cache, row, text, length=None):
        assert int(np.asarray(cache.lengths)[row]) == (length or len(text))
        layers = jax.device_get(cache.values)
        values = np.stack([layer[row, :, : len(text)] for layer in layers])
        np.testing.assert_allclose(values, slow_values(model, text), atol=1e-5)

    return check


def test_prompts_are_read_in_pieces(model, assert_read, monkeypatch):
    view = make_view(model, lengths=(5, 1, 17, 8), slots=20)
    for chunk in (4, 128):
        monkeypatch.setattr(small_lm, "_CHUNK", chunk)
        reader = SmallLM(model.sizes, REACH)
        cache = jax.jit(reader.prefill)(model.params, view.tokens, view.lengths)
        for row, length in enumerate(view.lengths.tolist()):
            assert_read(cache, row, np.asarray(view.tokens)[row, :length].tolist())


def test_cache_follows_rows_that_accept_different_counts(model, assert_read):
    """Rows accept 1 … 4 tokens per call; the last one is finished after its first."""
    params = model.params
    reader = SmallLM(model.sizes, REACH)
    # The last row ends without a free slot.
    view = make_view(model, lengths=(5, 1, 9, 15), slots=22)
    accepted = np.array([[1, 4, 2, 3], [4, 1, 3, 0], [1, 1, 4, 0], [4, 4, 1, 0]])

    @jax.jit
    def look(cache, tokens, lengths, next_token):
        seen = dataclasses.replace(
            view, tokens=tokens, lengths=lengths, next_token=next_token
        )
        reading = reader.start(params, cache, seen)
        logits = reader.logits(params, reading.hidden[:, 0])
        return reading.cache, jax.nn.log_softmax(logits)

    cache = jax.jit(reader.prefill)(params, view.tokens, view.lengths)
    for call, counts in enumerate([*accepted, [0] * 4]):
        cache, scores = look(cache, view.tokens, view.lengths, view.next_token)
        scores = np.asarray(scores)
        for row in range(4):
            text = whole_text(view, row)
            if call > 1 and row == 3:
                assert_read(cache, row, text[:-1], len(text))
                continue
            assert_read(cache, row, text)
            want = slow_read(model, text)
            np.testing.assert_allclose(scores[row], want, atol=1e-4)
        # Accepted tokens begin with the certain one; the others are already in place.
        tokens, lengths = np.array(view.tokens), np.array(view.lengths)
        active = np.flatnonzero(counts)
        tokens[active, lengths[active]] = view.next_token[active]
        lengths += counts
        following = np.where(counts, tokens[np.arange(4), lengths], view.next_token)
        view = dataclasses.replace(
            view,
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(lengths),
            next_token=jnp.asarray(following),
        )


@pytest.mark.parametrize("rows", [9, 17])
def test_rows_without_a_token_are_never_chosen(model, rows):
    size = model.config.trunk.vocab_size
    padded = SmallLM(model.sizes, REACH, vocab_size=rows)
    hidden = jax.random.normal(jax.random.key(0), (2, model.config.trunk.d_model))
    logits = padded.logits(model.params, hidden)
    assert logits.shape == (2, rows)
    plain, shared = model.next_token_logits(hidden), min(rows, size)
    np.testing.assert_array_equal(logits[:, :shared], plain[:, :shared])
    assert (np.asarray(logits[:, shared:]) < -1e8).all()
    # A token that the small LM does not have is read as its last one.
    tokens = jnp.array([[1, max(rows, size) - 1]])
    known = jnp.minimum(tokens, size - 1)
    cache = model.empty_cache(1, 8)
    got, _ = padded._pass(model.params, tokens, cache)
    want, _ = SmallLM(model.sizes, REACH)._pass(model.params, known, cache)
    np.testing.assert_array_equal(got, want)
