"""Tests of the choice of alpha."""

import pytest

from bpd_jax.evaluation.alpha import Tuned, best_alpha, tune_alpha


def test_alpha_of_the_highest_efficiency_is_chosen():
    assert best_alpha({0.1: (100, 60), 1.0: (100, 50), 5.0: (100, 49)}) == 5.0


@pytest.mark.parametrize(
    "equals, expected",
    [((0.1, 0.75, 10.0), 0.75), ((0.9, 1.1), 0.9), ((0.0, 1.0, 2.0), 1.0)],
)
def test_ties_go_to_the_alpha_nearest_1(equals, expected):
    assert best_alpha(dict.fromkeys(equals, (100, 50))) == expected


def test_reported_examples_do_not_choose_alpha():
    """2 is best on the tuning examples (10/4), 1 on the others (30/10 over 30/12)."""
    tune = {1.0: (10, 5), 2.0: (10, 4)}
    report = {1.0: (30, 10), 2.0: (30, 12)}
    assert tune_alpha(tune, report) == Tuned(2.0, 2.5, 1.0, 3.0)
