"""Choosing the weight alpha of a rescorer (paper appendix E, Table 8)."""

import dataclasses
from collections.abc import Mapping

Sums = Mapping[float, tuple[int, int]]
"""Decoded tokens and serial calls over some examples, by alpha."""


def best_alpha(sums: Sums) -> float:
    """The alpha of the highest block efficiency; ties go to the one nearest 1.

    1 is the default without tuning: heads and rescorer have equal weight. Values at the
    ends of the grid generalise worst to other texts. Of two alphas at the same distance
    from 1 the smaller one is chosen, which gives the model's own heads more weight.

    Args:
      sums: at least one entry; all over the same examples.
    """
    return min(sums, key=lambda a: (-_efficiency(sums[a]), abs(a - 1), a))


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A tuned alpha with its block efficiency.

    Attributes:
      alpha: chosen on the tuning examples.
      efficiency: its block efficiency on the reported examples.
      report_alpha: alpha chosen on the reported examples themselves, as the paper may
        have done ("evaluation set", appendix C.2; appendix E says held out).
      report_efficiency: block efficiency of `report_alpha` on the reported examples;
        never below `efficiency`.
    """

    alpha: float
    efficiency: float
    report_alpha: float
    report_efficiency: float


def tune_alpha(tune: Sums, report: Sums) -> Tuned:
    """Chooses alpha on some examples and reports it on others.

    Args:
      tune: sums over the tuning examples.
      report: sums over the reported examples, for the same alphas.
    """
    held_out, reported = best_alpha(tune), best_alpha(report)
    return Tuned(
        held_out, _efficiency(report[held_out]), reported, _efficiency(report[reported])
    )


def _efficiency(sums: tuple[int, int]) -> float:
    tokens, calls = sums
    return tokens / calls
