"""Choosing the weight alpha of a rescorer (paper appendix E, Table 8)."""

import dataclasses
from collections.abc import Mapping

Sums = Mapping[float, tuple[int, int]]
"""Decoded tokens and serial calls over some examples, by alpha."""


def best_alpha(sums: Sums) -> float:
    """The alpha of the highest block efficiency; ties go to the one nearest 1.

    At 1 heads and rescorer count alike, which is what one takes without tuning. A tie
    shows nothing that would speak for leaving it, and the extremes of the grid are the
    values that carry over worst to other texts. Of two that are as near, the smaller:
    it trusts the model's own heads more.

    Args:
      sums: one entry at least; all over the same examples.
    """
    return min(sums, key=lambda a: (-_efficiency(sums[a]), abs(a - 1), a))


@dataclasses.dataclass(frozen=True)
class Tuned:
    """An alpha and what it is worth.

    Attributes:
      alpha: chosen on the tuning examples.
      efficiency: its block efficiency on the others, which are reported.
      habit_alpha: chosen on the reported examples themselves, as the paper may have
        done ("evaluation set", appendix C.2; appendix E says held out).
      habit_efficiency: its block efficiency there; never below `efficiency`.
    """

    alpha: float
    efficiency: float
    habit_alpha: float
    habit_efficiency: float


def tune_alpha(tune: Sums, report: Sums) -> Tuned:
    """Chooses alpha on some examples and reports it on others.

    Args:
      tune: of the tuning examples.
      report: of the others; the same alphas.
    """
    chosen, habit = best_alpha(tune), best_alpha(report)
    return Tuned(chosen, _efficiency(report[chosen]), habit, _efficiency(report[habit]))


def _efficiency(sums: tuple[int, int]) -> float:
    tokens, calls = sums
    return tokens / calls
