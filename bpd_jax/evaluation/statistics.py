"""Fitted lines, permutation tests, and verdicts from intervals and several tests.

The paired tests compute how often a difference at least as large as the observed one
arises if the results of the two methods are swapped at random for each example
independently. `scipy.stats.permutation_test` enumerates all swaps if there are few, and
otherwise samples them with p = (1 + hits) / (1 + samples), which is never 0 and keeps
the test valid (Phipson and Smyth 2010).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import stats

FEWEST = 6
"""Number of examples below which nothing is significant at 5 %: five examples that all
favour the same method have a p-value of 2 / 2⁵ = 0.06."""

# More swaps or permutations are sampled, fewer are enumerated.
_MOST_SWAPS = 9999
# Number of values swapped together, which limits memory.
_MOST_VALUES = 1 << 24
_LEVEL = 0.05


def h_max(entropies: Sequence[float]) -> int:
    """Largest k with H[i] <= H[i + 1] for all i < k: the head up to which it grows.

    Values after the first decrease do not count:

    >>> h_max([1.0, 1.5, 1.5, 1.2, 3.0])
    3

    Args:
      entropies: mean entropy of heads 1 … L, in any unit.
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

    def grows(self) -> bool | None:
        """True if y increases with x, False if it decreases, None if insignificant."""
        return None if self.p_value >= _LEVEL else self.rank_correlation > 0

    def falls(self) -> bool | None:
        """True if y decreases with x, False if it increases, None if insignificant."""
        return None if self.p_value >= _LEVEL else self.rank_correlation < 0


def fit_line(x: Sequence[float], y: Sequence[float]) -> Fit | None:
    """Fits a line by linear regression.

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
        n_resamples=_MOST_SWAPS,
        rng=np.random.default_rng(0),
    )
    return Fit(
        float(line.slope),
        float(line.intercept),
        float(line.rvalue),
        float(ranks_x @ ranks_y) / len(x),
        float(test.pvalue),
    )


def sign_flip_test(differences: np.ndarray) -> float:
    """Two-sided p-value of a mean difference of scores; 1 for fewer than two examples.

    Args:
      differences: one method's score minus the other's for every example, `[n]`.
    """
    ones = np.ones(len(differences))
    return efficiency_test(differences, ones, 0 * ones, ones)


def efficiency_test(
    tokens: np.ndarray,
    calls: np.ndarray,
    base_tokens: np.ndarray,
    base_calls: np.ndarray,
) -> float:
    """Two-sided p-value of a difference in block efficiency, a ratio of sums.

    Args:
      tokens, calls: of one method, for every example, `[n]`.
      base_tokens, base_calls: of the other method, for the same examples.
    """
    count = len(tokens)
    if count < 2:  # A swap changes only the sign.
        return 1.0
    rows = np.arange(count)
    both_tokens, both_calls = (
        np.stack(pair) for pair in ((tokens, base_tokens), (calls, base_calls))
    )

    def difference(first: np.ndarray, second: np.ndarray, axis: int) -> np.ndarray:
        """The difference of methods 0 and 1, one of which is first in each example."""
        ratios = [
            both_tokens[method, rows].sum(-1) / both_calls[method, rows].sum(-1)
            for method in (first, second)
        ]
        return np.abs(ratios[0] - ratios[1])

    result = stats.permutation_test(
        (np.zeros(count, int), np.ones(count, int)),
        difference,
        permutation_type="samples",
        alternative="greater",
        vectorized=True,
        n_resamples=_MOST_SWAPS,
        batch=min(max(_MOST_VALUES // (2 * count), 1), 2000),
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts p-values for multiple comparisons (Holm 1979).

    The smallest of m values is multiplied by m, the next one by m - 1, and so on; no
    result is smaller than one before it or larger than 1.

    >>> holm([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]

    Returns:
      Adjusted values in the order of the arguments. The comparisons whose adjusted
      value is at most a level are jointly significant at this level.
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values, float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return [float(value) for value in adjusted]


def exceeds(interval: tuple[float, float], value: float = 0.0) -> bool | None:
    """True if an interval is above a value, False if below, None if it contains it.

    >>> exceeds((0.1, 0.3)), exceeds((-0.3, -0.1)), exceeds((-0.1, 0.3))
    (True, False, None)
    """
    low, high = interval
    return True if low > value else False if high < value else None


def combined_verdict(verdicts: Sequence[bool | None]) -> bool | None:
    """Combines the results of several comparisons.

    >>> combined_verdict([True, True]), combined_verdict([True, None])
    (True, None)
    >>> combined_verdict([None, False])
    False

    Returns:
      True if all are True; False if one is False; otherwise None.
    """
    if False in verdicts:
        return False
    return True if verdicts and None not in verdicts else None
