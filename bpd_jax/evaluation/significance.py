"""Whether one method beats another by more than chance: paired permutation tests.

Both tests ask how often a difference at least as large as the one seen arises if, for
every example by itself, it is a coin's toss which of two results belongs to which
method. Up to `EXACT` examples all tosses are counted; above, tosses are drawn, and
p = (1 + hits) / (1 + draws), which is never 0 and keeps the test valid (Phipson and
Smyth 2010). It also says what intervals, and several comparisons together, mean.
"""

from collections.abc import Sequence

import numpy as np

EXACT = 12

FEWEST = 6
"""Examples below which nothing is significant at 5 %: five that all point one way, each
by the toss of a coin, have a probability of 2 / 2⁵ = 0.06."""


def sign_flip_test(
    differences: np.ndarray, *, resamples: int = 9999, seed: int = 0
) -> float:
    """Two-sided p-value of a mean difference of per-example scores.

    Args:
      differences: of every example, one method's score minus the other's, `[n]`.
      resamples: tosses that are drawn, if they are.
      seed: of the draws.

    Returns:
      1 for no examples.
    """
    differences = np.asarray(differences, float)
    swaps, exact = _swaps(len(differences), resamples, seed)
    total = differences.sum()
    return _p_value(total, total - 2 * (swaps @ differences), exact)


def efficiency_test(
    tokens: np.ndarray,
    calls: np.ndarray,
    base_tokens: np.ndarray,
    base_calls: np.ndarray,
    *,
    resamples: int = 9999,
    seed: int = 0,
) -> float:
    """Two-sided p-value of a difference in block efficiency, a ratio of sums.

    Args:
      tokens, calls: of every example by one method, `[n]`.
      base_tokens, base_calls: of the same examples by the other.
      resamples, seed: as in `sign_flip_test`.

    Returns:
      1 for no examples.
    """
    if not len(tokens):
        return 1.0
    swaps, exact = _swaps(len(tokens), resamples, seed)
    token_gains = swaps @ (np.asarray(base_tokens, float) - tokens)
    call_gains = swaps @ (np.asarray(base_calls, float) - calls)
    mine = (tokens.sum() + token_gains) / (calls.sum() + call_gains)
    theirs = (base_tokens.sum() - token_gains) / (base_calls.sum() - call_gains)
    seen = tokens.sum() / calls.sum() - base_tokens.sum() / base_calls.sum()
    return _p_value(seen, mine - theirs, exact)


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrects p-values for that there are several (Holm 1979).

    The smallest of m is multiplied by m, the next by m - 1, and so on; none becomes
    smaller than one before it, or more than 1.

    >>> holm([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]

    Returns:
      Adjusted values in the given order: those up to a level hold together at it.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in enumerate(order):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted


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


def _swaps(count: int, resamples: int, seed: int) -> tuple[np.ndarray, bool]:
    """Tosses, `[R, n]` of 0 and 1, and whether they are all that there are."""
    if count <= EXACT:
        numbers = np.arange(2**count)[:, None]
        return (numbers >> np.arange(count) & 1).astype(float), True
    drawn = np.random.default_rng(seed).integers(0, 2, (resamples, count))
    return drawn.astype(float), False


def _p_value(seen: float, permuted: np.ndarray, exact: bool) -> float:
    """Share of differences as large as the one seen, up to rounding."""
    hits = int((np.abs(permuted) >= abs(seen) * (1 - 1e-9) - 1e-12).sum())
    total = len(permuted)
    return hits / total if exact else (1 + hits) / (1 + total)
