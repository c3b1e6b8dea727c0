"""Means and perplexities over examples."""

import math

import pytest

from bpd_jax.evaluation.metrics.estimates import estimate


def test_means_are_in_percent():
    scores = [{"f1": 0.5, "exact_match": 0.0}, {"f1": 1.0}, {"other": 0.2}]
    result = estimate("f1", scores)
    assert result.value == 75
    assert result.interval == (50, 100)
    assert estimate("exact_match", scores) == (0, None)  # no interval for one example
    assert estimate("rouge1", scores) is None


def test_perplexity_weights_tokens():
    """Two tokens of probability 1/2 each and two of 1/8 each: exp(8 ln 2 / 4) = 4."""
    scores = [
        {"log_prob": 3 * math.log(1 / 2), "tokens": 3.0},
        {"log_prob": math.log(1 / 32), "tokens": 1.0},
    ]
    result = estimate("perplexity", scores)
    assert result.value == pytest.approx(4)
    assert result.interval == pytest.approx((2, 32))
    assert estimate("last_word_perplexity", scores) is None
