"""Tests of enumerated and of sampled p-values."""

import numpy as np
import pytest

from bpd_jax.evaluation import significance
from bpd_jax.evaluation.significance import (
    FEWEST,
    efficiency_test,
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
    differences = np.random.default_rng(0).normal(0.3, 1, 14)
    # The exact value, from all sign patterns.
    signs = 1 - 2 * (np.arange(2**14)[:, None] >> np.arange(14) & 1)
    exact = (abs(signs @ differences) >= abs(differences.sum()) - 1e-9).mean()
    assert sign_flip_test(differences) == pytest.approx(exact, abs=0.01)
    assert sign_flip_test(np.ones(40)) == 1 / 10_000


def test_the_memory_of_a_test_is_limited(monkeypatch):
    """The swaps of many examples are drawn in parts, which changes no p-value."""
    differences = np.random.default_rng(0).normal(0.3, 1, 20)
    p_value = sign_flip_test(differences)
    monkeypatch.setattr(significance, "_MOST_VALUES", 12_000)
    assert sign_flip_test(differences) == p_value


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


def test_holm_correction_is_at_most_1():
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
