"""How sure the heads are, and how block efficiency follows (paper section 6.2)."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import stats

# Orders that are drawn for a p-value, where there are more: eight points or more.
_ORDERS = 9999


def h_max(entropies: Sequence[float]) -> int:
    """Largest k with H[i] <= H[i + 1] for all i < k: how far entropy grows.

    Worked example: entropies 1.0, 1.5, 1.5, 1.2, 3.0 grow up to head 3, so 3; what
    comes after the first fall does not count. Falling at once gives 1.

    >>> h_max([1.0, 1.5, 1.5, 1.2, 3.0])
    3

    Args:
      entropies: mean entropy of heads 1 … L; the unit does not matter.

    Returns:
      1 … L.
    """
    falls = np.diff(np.asarray(entropies, float)) < 0
    return int(np.argmax(falls)) + 1 if falls.any() else len(entropies)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A least-squares line through points.

    Attributes:
      slope, intercept: of y over x.
      correlation: Pearson's R.
      rank_correlation: Spearman's: Pearson's R of the ranks, equals sharing the mean of
        theirs.
      p_value: of the rank correlation, two-sided, by permutation.
    """

    slope: float
    intercept: float
    correlation: float
    rank_correlation: float
    p_value: float

    def grows(self, level: float = 0.05) -> bool | None:
        """Whether y grows with x, or falls; None where chance may do as much."""
        return None if self.p_value >= level else self.rank_correlation > 0

    def falls(self, level: float = 0.05) -> bool | None:
        """Whether y falls with x, or grows; None where chance may do as much."""
        return None if self.p_value >= level else self.rank_correlation < 0


def fit_line(x: Sequence[float], y: Sequence[float]) -> Fit | None:
    """Fits a line by linear regression.

    Args:
      x, y: of equal length.

    Returns:
      None where a correlation means nothing: fewer than 3 points, or all x or all y
      are the same.
    """
    if len(x) < 3 or min(x) == max(x) or min(y) == max(y):
        return None
    line = stats.linregress(x, y)
    ranks_x, ranks_y = (stats.zscore(stats.rankdata(v)) for v in (x, y))
    test = stats.permutation_test(
        (ranks_y,),
        lambda order, axis: np.abs(order @ ranks_x),
        permutation_type="pairings",
        alternative="greater",
        vectorized=True,
        n_resamples=_ORDERS,
        rng=np.random.default_rng(0),
    )
    return Fit(
        float(line.slope),
        float(line.intercept),
        float(line.rvalue),
        float(ranks_x @ ranks_y) / len(x),
        float(test.pvalue),
    )
