"""Entropy of the heads and its relation to block efficiency (paper section 6.2)."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import stats

# Permutations drawn for a p-value; with fewer than eight points all are enumerated.
_PERMUTATIONS = 9999


def h_max(entropies: Sequence[float]) -> int:
    """Largest k with H[i] <= H[i + 1] for all i < k: the head up to which it grows.

    Worked example: the entropies 1.0, 1.5, 1.5, 1.2, 3.0 grow up to head 3, so the
    result is 3; values after the first decrease do not count. If the second value is
    smaller than the first, the result is 1.

    >>> h_max([1.0, 1.5, 1.5, 1.2, 3.0])
    3

    Args:
      entropies: mean entropy of heads 1 … L, in any unit.

    Returns:
      A number in 1 … L.
    """
    falls = np.diff(np.asarray(entropies, float)) < 0
    return int(np.argmax(falls)) + 1 if falls.any() else len(entropies)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A least-squares line through points.

    Attributes:
      slope, intercept: slope and intercept of the regression of y on x.
      correlation: Pearson's R.
      rank_correlation: Spearman's rank correlation; ties share the mean of their ranks.
      p_value: two-sided p-value of the rank correlation, from a permutation test.
    """

    slope: float
    intercept: float
    correlation: float
    rank_correlation: float
    p_value: float

    def grows(self, level: float = 0.05) -> bool | None:
        """True if y increases with x, False if it decreases, None if insignificant."""
        return None if self.p_value >= level else self.rank_correlation > 0

    def falls(self, level: float = 0.05) -> bool | None:
        """True if y decreases with x, False if it increases, None if insignificant."""
        return None if self.p_value >= level else self.rank_correlation < 0


def fit_line(x: Sequence[float], y: Sequence[float]) -> Fit | None:
    """Fits a line by linear regression.

    Args:
      x, y: coordinates of the points.

    Returns:
      None if the correlation is undefined: fewer than 3 points, or all x or all y are
      equal.
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
        n_resamples=_PERMUTATIONS,
        rng=np.random.default_rng(0),
    )
    return Fit(
        float(line.slope),
        float(line.intercept),
        float(line.rvalue),
        float(ranks_x @ ranks_y) / len(x),
        float(test.pvalue),
    )
