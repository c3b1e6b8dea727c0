"""Tests of h_max and of fitted lines, computed by hand."""

import pytest

from bpd_jax.evaluation.entropy import fit_line, h_max


@pytest.mark.parametrize(
    "entropies, expected",
    [
        ([2.0, 1.0, 3.0], 1),
        ([1.0, 2.0, 3.0], 3),
        ([4.0, 4.0], 2),
        ([4.0], 1),
    ],
)
def test_h_max_is_the_last_head_before_the_first_decrease(entropies, expected):
    assert h_max(entropies) == expected


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
