"""Position-by-position comparison of refined and vanilla drafts (paper Table 5)."""

import dataclasses
from typing import Self

import numpy as np


@dataclasses.dataclass(frozen=True)
class Changes:
    """Positions with the same outcome, and the effect of refinement on repetition.

    Attributes:
      total: number of positions.
      repaired: positions where the vanilla draft has equal neighbouring tokens and the
        refined draft has none.
      introduced: positions where the refined draft has equal neighbouring tokens and
        the vanilla draft has none.
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
        """Share of positions that repair repetition; None without positions."""
        return self.repaired / self.total if self.total else None

    @property
    def regress(self) -> float | None:
        """Share of positions that introduce repetition; None without positions."""
        return self.introduced / self.total if self.total else None


@dataclasses.dataclass(frozen=True)
class DraftComparison:
    """Positions where refined drafts yield as many, more, and fewer tokens."""

    ties: int = 0
    wins: Changes = Changes()
    losses: Changes = Changes()

    def __add__(self, other: Self) -> "DraftComparison":
        return DraftComparison(
            self.ties + other.ties, self.wins + other.wins, self.losses + other.losses
        )

    @property
    def positions(self) -> int:
        """Number of all positions."""
        return self.ties + self.wins.total + self.losses.total


def compare_drafts(
    vanilla_accepted: np.ndarray,
    vanilla_equal: np.ndarray,
    refined_accepted: np.ndarray,
    refined_equal: np.ndarray,
) -> DraftComparison:
    """Compares the drafts of two methods along one text.

    Every token of the text is a position, even if decoding makes no serial call there:
    LAMBADA's counts in Table 5 add up to its number of tokens. A win is a position
    where a call would yield more tokens with the refined draft.

    Args:
      vanilla_accepted, refined_accepted: `[T]`, tokens that a call at each position
        yields.
      vanilla_equal, refined_equal: `[T]`, number of equal neighbouring tokens in the
        draft at each position.
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
