"""Axes: ticks, pixel positions, and the width of texts."""

import pytest

from bpd_jax.reporting import axes
from bpd_jax.reporting.axes import Axis


@pytest.mark.parametrize("low, high", [(0, 3000), (-3, 1e-4), (7, 7), (0.1, 0.3)])
def test_ticks_are_round_and_cover_the_data(low, high):
    ticks = axes.ticks(low, high)
    assert ticks[0] <= low <= high <= ticks[-1]
    assert 2 <= len(ticks) <= 8


def test_few_integers_are_ticks():
    assert axes.ticks_inside([9, 3, 6, 3]) == [3, 6, 9]
    assert axes.ticks_inside([0.5, 2.25]) == [0.5, 1, 1.5, 2]
    assert axes.log_ticks([1, 2, 4, 8, 16]) == [1, 2, 4, 8, 16]
    assert axes.log_ticks(list(range(3, 130))) == [5, 10, 20, 50, 100]


def test_positions_on_an_axis():
    linear = Axis(2, 4, 100, 20, [])
    assert [linear.position(value) for value in (2, 2.5, 4)] == [100, 80, 20]
    # Equal factors have equal lengths: 4 is half-way from 1 to 16.
    assert Axis(1, 16, 0, 60, [], logarithmic=True).position(4) == 30
    assert Axis(3, 3, 0, 60, []).position(3) == 30


def test_texts_are_shortened_until_they_fit():
    assert axes.shortened("SQuAD", 100) == "SQuAD"
    text = axes.shortened("Retrieval-augmented generation", 90)
    assert text.endswith("…")
    assert text[:-1] in "Retrieval-augmented generation"
    assert axes.text_width(text) <= 90
