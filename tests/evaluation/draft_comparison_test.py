"""Tests of wins, ties and losses of refined drafts, counted by hand."""

import numpy as np

from bpd_jax.evaluation.draft_comparison import Changes, DraftComparison, compare_drafts


def test_every_position_is_counted_once():
    """Columns: tie; tie that repairs; win that repairs; win that repairs one of two
    repeats only; win that introduces; loss that repairs; loss without change."""
    comparison = compare_drafts(
        vanilla_accepted=np.array([2, 1, 1, 1, 2, 3, 4]),
        vanilla_equal=np.array([0, 1, 2, 2, 0, 1, 0]),
        refined_accepted=np.array([2, 1, 2, 3, 4, 2, 1]),
        refined_equal=np.array([0, 0, 0, 1, 3, 0, 0]),
    )
    assert comparison == DraftComparison(
        ties=2, wins=Changes(3, 1, 1), losses=Changes(2, 1, 0)
    )
    assert comparison.positions == 7
    assert (comparison.wins.repair, comparison.wins.regress) == (1 / 3, 1 / 3)
    assert (comparison.losses.repair, comparison.losses.regress) == (1 / 2, 0)


def test_comparisons_of_texts_add_up():
    a = DraftComparison(1, Changes(2, 1, 0), Changes(3, 0, 2))
    b = DraftComparison(10, Changes(20, 10, 5), Changes())
    assert a + b == DraftComparison(11, Changes(22, 11, 5), Changes(3, 0, 2))


def test_shares_without_positions_are_none():
    assert Changes().repair is None
    assert Changes().regress is None
