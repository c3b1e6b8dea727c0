"""Intervals, fitted lines and p-values, computed by hand."""

import numpy as np
import pytest

from bpd_jax.evaluation.efficiency import (
    best_alpha,
    block_efficiency,
    bootstrap_interval,
    difference_interval,
    headroom_taken,
    paired_interval,
)
from bpd_jax.evaluation.statistics import (
    FEWEST,
    efficiency_test,
    fit_line,
    h_max,
    holm,
    sign_flip_test,
)


def test_three_examples_have_eight_sign_patterns():
    """Sums of ±1 ±2 ±3 are at least 6 away from 0 twice, at least 4 away four times."""
    assert sign_flip_test(np.array([1.0, 2.0, 3.0])) == 2 / 8
    assert sign_flip_test(np.array([-1.0, 2.0, 3.0])) == 4 / 8
    # Fewer examples are never significant, even if all point one way.
    assert sign_flip_test(np.ones(FEWEST - 1)) == 2 / 2**5 > 0.05
    assert sign_flip_test(np.ones(FEWEST)) == 2 / 2**6 < 0.05


def test_sampled_p_values_are_near_the_exact_ones_and_never_0():
    differences = np.random.default_rng(0).normal(0.3, 1, 14)
    # The exact value, from all sign patterns.
    signs = 1 - 2 * (np.arange(2**14)[:, None] >> np.arange(14) & 1)
    exact = (abs(signs @ differences) >= abs(differences.sum()) - 1e-9).mean()
    assert sign_flip_test(differences) == pytest.approx(exact, abs=0.01)
    assert sign_flip_test(np.ones(40)) == 1 / 10_000


def test_efficiency_of_two_examples():
    """Texts of 12 and 6 tokens in 4 and 3 calls, against 6 and 6.

    Differences in 18 / calls: as it is 18/7 - 18/12; both swapped its reverse; one
    swapped 18/9 - 18/10 and 18/10 - 18/9. Two of four are as large.
    """
    tokens = np.array([12, 6])
    p_value = efficiency_test(tokens, np.array([4, 3]), tokens, np.array([6, 6]))
    assert p_value == 2 / 4


def test_holm_correction_is_at_most_1():
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_h_max_is_the_last_head_before_the_first_decrease():
    assert h_max([2.0, 1.0, 3.0]) == h_max([4.0]) == 1
    assert h_max([4.0, 4.0]) == 2
    assert h_max([1.0, 2.0, 3.0]) == 3


def test_fit_of_four_points():
    """Means 2.5 and 3; Sxy = 6, Sxx = 5, Syy = 8; ranks of y 0, 1.5, 1.5, 3."""
    fit = fit_line([1, 2, 3, 4], [1, 3, 3, 5])
    assert fit.slope == pytest.approx(6 / 5)
    assert fit.intercept == pytest.approx(3 - 6 / 5 * 2.5)
    assert fit.correlation == pytest.approx(6 / (5 * 8) ** 0.5)
    # Ranks of x are 0 … 3: Sxy = 4.5, Sxx = 5, Syy = 4.5.
    assert fit.rank_correlation == pytest.approx(4.5 / (5 * 4.5) ** 0.5)


@pytest.mark.parametrize(
    "x, y", [([], []), ([1, 2], [1, 2]), ([2, 2, 2], [1, 2, 3]), ([1, 2, 3], [5] * 3)]
)
def test_undefined_correlations_are_none(x, y):
    assert fit_line(x, y) is None


def test_permutation_test_distinguishes_trend_from_chance():
    """Of 6 points, 2 of 720 orders are as strictly monotonic as 1 … 6; of 3, 2 of 6."""
    rising = fit_line(range(6), [1, 2, 4, 8, 16, 32])
    assert rising.p_value == pytest.approx(2 / 720, abs=0.003)
    assert rising.grows() is True
    assert rising.falls() is False
    # The rank correlation depends only on the order.
    few = fit_line([1, 2, 3], [9, 5, -1000])
    assert few.rank_correlation == pytest.approx(-1)
    assert -1 < few.correlation < -0.8
    assert few.p_value == pytest.approx(1 / 3, abs=0.03)
    assert few.grows() is None
    assert few.falls() is None


@pytest.fixture
def texts(make_generation):
    """Makes texts of 40 tokens from their numbers of serial calls."""
    return lambda calls: [make_generation([1] * 40, n) for n in calls]


def test_block_efficiency_is_a_ratio_of_sums(make_generation):
    texts = [make_generation([1] * 8, 2), make_generation([1] * 2, 2)]
    assert block_efficiency(texts) == 10 / 4
    low, high = bootstrap_interval(texts)
    assert low == 1.0
    assert high == 4.0
    assert bootstrap_interval([texts[0]] * 5) == (4.0, 4.0)


def test_paired_interval_is_narrower_than_either_method_alone(texts):
    """The refined method needs a quarter fewer calls on every prompt."""
    calls = np.random.default_rng(0).integers(8, 40, size=30)
    method, base = texts(np.ceil(0.75 * calls).astype(int)), texts(calls)
    low, high = paired_interval(method, base)
    gain = block_efficiency(method) / block_efficiency(base) - 1
    assert 0 < low < gain < high
    # The interval for unpaired prompts, computed from the two intervals.
    (low_m, high_m), (low_b, high_b) = map(bootstrap_interval, (method, base))
    assert high - low < 0.2 * (high_m / low_b - low_m / high_b)


def test_interval_of_a_difference_of_two_examples():
    """1 of 2 and 0 of 1 cases, against 0 of 1 and 1 of 1.

    The first example twice gives 2 / 4 - 0 / 2 = 1/2, both 1 / 3 - 1 / 2 = -1/6, the
    second twice 0 / 2 - 2 / 2 = -1; half of the resamples are of both.
    """
    shares = [np.array(values) for values in ([1, 0], [2, 1], [0, 1], [1, 1])]
    assert difference_interval(*shares) == (-1, 0.5)


def test_resamples_without_cases_are_omitted():
    """The second example alone has no case of the first share."""
    shares = [np.array(values) for values in ([1, 0], [2, 0], [0, 1], [1, 1])]
    assert difference_interval(*shares) == (0, 0.5)
    no_cases = np.zeros(2)
    assert difference_interval(no_cases, no_cases, *shares[2:]) is None
    assert difference_interval(*[np.zeros(0)] * 4) is None


@pytest.mark.parametrize(
    "efficiencies, alpha",
    [
        ({0.1: 1.67, 1.0: 2.0, 5.0: 2.04}, 5.0),
        # Of equal ones the nearest to 1 counts, and of two of these the smaller one.
        (dict.fromkeys((0.1, 0.75, 10.0), 2.0), 0.75),
        (dict.fromkeys((0.9, 1.1), 2.0), 0.9),
    ],
)
def test_alpha_of_the_highest_efficiency_is_chosen(efficiencies, alpha):
    assert best_alpha(efficiencies) == alpha


def test_fraction_of_the_headroom():
    assert headroom_taken(1.0, base=1.5, oracle=2.5) == -0.5
    # NewsRoom of the paper: 16-best 4-gram 1.31, BPD 1.08, oracle 1.50.
    assert headroom_taken(1.31, 1.08, 1.50) == pytest.approx(0.23 / 0.42)
    assert headroom_taken(1.5, base=1.5, oracle=1.5) is None
