"""Tests of enumerated and of sampled p-values."""

import numpy as np
import pytest

from bpd_jax.evaluation.significance import (
    FEWEST,
    combined_verdict,
    efficiency_test,
    exceeds,
    holm,
    sign_flip_test,
)


def test_three_examples_have_eight_sign_patterns():
    """Sums of ±1 ±2 ±3 are at least 6 away from 0 twice, at least 4 away four times."""
    assert sign_flip_test(np.array([1.0, 2.0, 3.0])) == 2 / 8
    assert sign_flip_test(np.array([-1.0, 2.0, 3.0])) == 4 / 8


def test_rounding_does_not_hide_ties():
    """0.1 + 0.2 and 0.3: all eight sums of ±0.1 ±0.2 ±0.3 are 0 or more from 0."""
    assert sign_flip_test(np.array([0.1, 0.2, -0.3])) == 1.0


def test_equal_scores_have_p_value_1():
    assert sign_flip_test(np.zeros(5)) == 1.0
    assert sign_flip_test(np.zeros(50)) == 1.0
    assert sign_flip_test(np.zeros(0)) == 1.0


def test_sampled_p_values_are_near_the_exact_ones_and_never_0():
    rng = np.random.default_rng(0)
    drawn = sign_flip_test(rng.normal(0.3, 1, 13), resamples=20000)
    # The exact value for 13, from a loop over all sign patterns.
    differences = np.random.default_rng(0).normal(0.3, 1, 13)
    signs = 1 - 2 * (np.arange(2**13)[:, None] >> np.arange(13) & 1)
    exact = (abs(signs @ differences) >= abs(differences.sum()) - 1e-9).mean()
    assert drawn == pytest.approx(exact, abs=0.01)
    assert sign_flip_test(np.ones(40), resamples=99) == 1 / 100


def test_sampled_p_values_depend_on_the_seed():
    differences = np.random.default_rng(1).normal(0.2, 1, 30)
    first, repeated, second = (sign_flip_test(differences, seed=s) for s in (1, 1, 2))
    assert first == repeated != second


def test_efficiency_of_two_examples():
    """Texts of 12 and 6 tokens in 4 and 3 calls, against 6 and 6.

    Differences in 18 / calls: as it is 18/7 - 18/12; both swapped its reverse; one
    swapped 18/9 - 18/10 and 18/10 - 18/9. Two of four are as large.
    """
    tokens = np.array([12, 6])
    p_value = efficiency_test(tokens, np.array([4, 3]), tokens, np.array([6, 6]))
    assert p_value == 2 / 4


def test_efficiency_of_many_examples():
    rng = np.random.default_rng(2)
    tokens = rng.integers(20, 60, 60)
    calls = tokens // 2
    assert efficiency_test(tokens, calls, tokens, calls + 2) == 1 / 10000
    noise = calls + rng.integers(-1, 2, 60)
    assert efficiency_test(tokens, calls, tokens, noise) > 0.02
    assert efficiency_test(*[np.zeros(0)] * 4) == 1.0


def test_fewer_examples_are_never_significant():
    """All pointing one way: 2 / 2⁵ = 0.0625 and 2 / 2⁶ = 0.03125."""
    assert sign_flip_test(np.ones(FEWEST - 1)) == 2 / 2**5 > 0.05
    assert sign_flip_test(np.ones(FEWEST)) == 2 / 2**6 < 0.05


def test_intervals_above_below_or_around_a_value():
    assert exceeds((0.1, 0.3)) is True
    assert exceeds((0.9, 0.95), 1.0) is False
    assert exceeds((0.0, 0.3)) is exceeds((-0.3, 0.0)) is None


def test_combined_verdict():
    assert combined_verdict([True, True]) is True
    assert combined_verdict([True, None]) is combined_verdict([]) is None
    assert combined_verdict([True, None, False]) is False


def test_holm_correction_computed_by_hand():
    """0.01 · 3, then 0.03 · 2, then 0.04 · 1, which may not be below 0.06."""
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
