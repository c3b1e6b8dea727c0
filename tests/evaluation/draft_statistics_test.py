"""Tests of draft statistics, computed by hand."""

import numpy as np
import pytest

from bpd_jax.evaluation.draft_statistics import (
    DraftStatistics,
    draft_statistics,
    repetition,
)

NAN = np.nan


@pytest.mark.parametrize(
    "drafts, share, run",
    [
        # The example of the docstring.
        ([[7, 7, 7, 8], [1, 2, 3, 4]], 1 / 3, 2.0),
        # A run ends at another token; the longest run is counted.
        ([[5, 5, 6, 6, 6, 5]], 3 / 5, 3.0),
        # Padding repeats nothing.
        ([[5, -1, -1], [5, 6, -1]], 0.0, 1.0),
        # Drafts of one token are ignored.
        ([[5, -1, -1], [5, 5, -1]], 1.0, 2.0),
        ([[5, -1], [6, -1]], None, None),
    ],
)
def test_repetition_of_drafts(drafts, share, run):
    assert repetition(np.array(drafts)) == (pytest.approx(share), run)


def test_statistics_cover_all_calls_of_all_prompts(make_generation):
    first = make_generation(
        [1] * 5,
        2,
        proposed=np.array([[5, 5, 5, 6], [1, 2, 3, 4]]),
        accepted=np.array([4, 1]),
        nodes=np.array([10, 6]),
        entropies=np.array([[0, 1.0, 2.0, NAN], [0, 4.0, NAN, NAN]]),
    )
    second = make_generation(
        [1] * 2,
        1,
        proposed=np.array([[7, 7, -1, -1]]),
        accepted=np.array([2]),
        nodes=np.array([2]),
        entropies=np.array([[0, 4.0, NAN, NAN]]),
    )
    statistics = draft_statistics([first, second])
    assert statistics.nodes == 6.0
    assert statistics.repeated == pytest.approx((2 + 0 + 1) / (3 + 3 + 1))
    assert statistics.longest_run == (3 + 1 + 2) / 3
    # Of head 2 three times, of head 3 once, of head 4 never.
    assert statistics.entropies == (3.0, 2.0)
    assert statistics.accepted == pytest.approx((1 / 3, 1 / 3, 0, 1 / 3))


def test_plain_decoding_has_no_draft_statistics(make_generation):
    statistics = draft_statistics([make_generation([1, 2, 3], 3)])
    assert statistics == DraftStatistics(1.0, None, None, (), (1.0,))
