"""Tests of bpd_jax.ngrams.interpolate."""

import dataclasses

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.interpolate import interpolate
from bpd_jax.ngrams.katz import estimate_katz
from tests.ngrams.helpers import assert_same, ngram_set


@pytest.fixture(scope="module")
def bigrams():
    """A bigram model of another text, which contains token 9."""
    rng = np.random.default_rng(5)
    sequences = [rng.integers(4, 10, size=6) for _ in range(20)]
    return estimate_katz(count_ngrams(sequences, order=2, vocab_size=10))


def test_ngrams_of_either_model_have_the_mixed_probability(trigrams, bigrams):
    mixed = interpolate(trigrams, bigrams, 0.3)
    assert ngram_set(mixed) == ngram_set(trigrams) | ngram_set(bigrams)
    for order in (1, 2, 3):
        rows = mixed.ngrams(order)
        first, second = (
            np.exp(model.log_probs_of(rows[:, :-1], rows[:, -1]))
            for model in (trigrams, bigrams)
        )
        expected = 0.3 * first + 0.7 * second
        np.testing.assert_allclose(np.exp(mixed.log_probs[order - 1]), expected)


def test_unseen_symbols_share_the_remaining_mass(trigrams, bigrams):
    mixed = interpolate(trigrams, bigrams, 0.3)
    mixed.validate(1e-12)
    # `9 9` is a history of neither model, so that the mixture is exact.
    first, second, mixture = (
        np.exp(model.log_prob([9, 9, 9], 4)) for model in (trigrams, bigrams, mixed)
    )
    assert mixture == pytest.approx(0.3 * first + 0.7 * second)


def test_model_interpolated_with_itself_is_unchanged(trigrams):
    mixed = interpolate(trigrams, trigrams, 0.4)
    assert_same(mixed, trigrams, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("weight", [0.0, 1.0, -1.0, float("nan")])
def test_weights_out_of_range_are_refused(trigrams, weight):
    with pytest.raises(UserError, match="must lie between 0 and 1"):
        interpolate(trigrams, trigrams, weight)


def test_different_vocabularies_are_refused(trigrams, document_model):
    with pytest.raises(UserError, match="end-of-text tokens None and 9"):
        interpolate(trigrams, document_model, 0.5)
    with pytest.raises(UserError, match=r"sizes 10 and 11.* the same --vocab_size"):
        interpolate(trigrams, dataclasses.replace(trigrams, vocab_size=11), 0.5)
