"""Refined drafts against vanilla ones, position by position (paper Table 5)."""

import dataclasses
from typing import Self

import numpy as np


@dataclasses.dataclass(frozen=True)
class Changes:
    """Positions of one outcome, and what refinement did to repetition there.

    Attributes:
      total: positions.
      repaired: the vanilla draft had equal neighbours and the refined one has none.
      introduced: the reverse.
    """

    total: int = 0
    repaired: int = 0
    introduced: int = 0

    def __add__(self, other: "Changes") -> "Changes":
        return Changes(
            self.total + other.total,
            self.repaired + other.repaired,
            self.introduced + other.introduced,
        )

    @property
    def repair(self) -> float | None:
        """Share that repair repetition; None of none."""
        return self.repaired / self.total if self.total else None

    @property
    def regress(self) -> float | None:
        """Share that introduce it; None of none."""
        return self.introduced / self.total if self.total else None


@dataclasses.dataclass(frozen=True)
class DraftComparison:
    """Positions where refined drafts yield as much, more and less than vanilla ones."""

    ties: int = 0
    wins: Changes = Changes()
    losses: Changes = Changes()

    def __add__(self, other: Self) -> "DraftComparison":
        return DraftComparison(
            self.ties + other.ties, self.wins + other.wins, self.losses + other.losses
        )

    @property
    def positions(self) -> int:
        """All of them."""
        return self.ties + self.wins.total + self.losses.total


def compare_drafts(
    vanilla_accepted: np.ndarray,
    vanilla_equal: np.ndarray,
    refined_accepted: np.ndarray,
    refined_equal: np.ndarray,
) -> DraftComparison:
    """Compares the drafts of two methods along one text.

    A position is a token of the text, whether decoding calls there or not: LAMBADA's
    counts in Table 5 add up to its tokens. A win is a position where a call would yield
    more tokens with the refined draft.

    Args:
      vanilla_accepted, refined_accepted: `[T]`, tokens that a call there yields.
      vanilla_equal, refined_equal: `[T]`, equal neighbours in the draft there.
    """
    repaired = (vanilla_equal > 0) & (refined_equal == 0)
    introduced = (vanilla_equal == 0) & (refined_equal > 0)

    def changes(where: np.ndarray) -> Changes:
        return Changes(
            int(where.sum()),
            int((where & repaired).sum()),
            int((where & introduced).sum()),
        )

    return DraftComparison(
        int((refined_accepted == vanilla_accepted).sum()),
        changes(refined_accepted > vanilla_accepted),
        changes(refined_accepted < vanilla_accepted),
    )
