"""Whether one method beats another by more than chance: paired permutation tests.

Both tests ask how often a difference at least as large as the one seen arises if, for
every example by itself, it is a coin's toss which of two results belongs to which
method. `scipy.stats.permutation_test` counts all tosses where there are few, and draws
them otherwise, with p = (1 + hits) / (1 + draws), which is never 0 and keeps the test
valid (Phipson and Smyth 2010). It also says what intervals, and several comparisons
together, mean.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

FEWEST = 6
"""Examples below which nothing is significant at 5 %: five that all point one way, each
by the toss of a coin, have a probability of 2 / 2⁵ = 0.06."""


def sign_flip_test(differences: np.ndarray, **settings: Any) -> float:
    """Two-sided p-value of a mean difference of per-example scores.

    Args:
      differences: of every example, one method's score minus the other's, `[n]`.
      **settings: of the test: `resamples`, `seed`.

    Returns:
      1 for no examples, and for one.
    """
    signed = np.stack([differences, -np.asarray(differences, float)])
    rows = np.arange(len(differences))
    return _swap_test(
        lambda mine, _: np.abs(signed[mine, rows].sum(-1)), len(rows), **settings
    )


def efficiency_test(
    tokens: np.ndarray,
    calls: np.ndarray,
    base_tokens: np.ndarray,
    base_calls: np.ndarray,
    **settings: Any,
) -> float:
    """Two-sided p-value of a difference in block efficiency, a ratio of sums.

    Args:
      tokens, calls: of every example by one method, `[n]`.
      base_tokens, base_calls: of the same examples by the other.
      **settings: as in `sign_flip_test`.

    Returns:
      1 for no examples, and for one.
    """
    rows = np.arange(len(tokens))
    both_tokens, both_calls = (
        np.stack(pair) for pair in ((tokens, base_tokens), (calls, base_calls))
    )

    def difference(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        ratios = [
            both_tokens[who, rows].sum(-1) / both_calls[who, rows].sum(-1)
            for who in (mine, theirs)
        ]
        return np.abs(ratios[0] - ratios[1])

    return _swap_test(difference, len(rows), **settings)


def _swap_test(
    statistic: Callable[[np.ndarray, np.ndarray], np.ndarray],
    count: int,
    *,
    resamples: int = 9999,
    seed: int = 0,
) -> float:
    """Share of swaps of the methods with a statistic as large as the one seen.

    Args:
      statistic: of which method stands first and second for each example, `[..., n]`
        of 0 and 1 each.
      count: n.
      resamples: swaps that are drawn, where there are more.
      seed: of the draws.
    """
    if count < 2:  # A swap changes nothing but the sign.
        return 1.0
    found = stats.permutation_test(
        (np.zeros(count, int), np.ones(count, int)),
        lambda mine, theirs, axis: statistic(mine, theirs),
        permutation_type="samples",
        alternative="greater",
        vectorized=True,
        n_resamples=resamples,
        batch=2000,
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrects p-values for that there are several (Holm 1979).

    The smallest of m is multiplied by m, the next by m - 1, and so on; none becomes
    smaller than one before it, or more than 1.

    >>> holm([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]

    Returns:
      Adjusted values in the given order: those up to a level hold together at it.
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values, float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return [float(value) for value in adjusted]


def side(interval: tuple[float, float], value: float = 0.0) -> bool | None:
    """Whether an interval lies above a value, or below; None where it holds it.

    >>> side((0.1, 0.3)), side((-0.3, -0.1)), side((-0.1, 0.3))
    (True, False, None)
    """
    low, high = interval
    return True if low > value else False if high < value else None


def together(verdicts: Sequence[bool | None]) -> bool | None:
    """Whether several comparisons bear out that all are so.

    >>> together([True, True]), together([True, None]), together([None, False])
    (True, None, False)

    Returns:
      False if one speaks against it; None of none, or if one cannot tell.
    """
    if False in verdicts:
        return False
    return True if verdicts and None not in verdicts else None
