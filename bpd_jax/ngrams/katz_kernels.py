"""Compiled inner loops of Katz estimation."""

import numba
import numpy as np

from bpd_jax.ngrams.trie_kernels import FLOATS, FLOATS_OUT, INTS, INTS_OUT, RANGE


@numba.njit(numba.void(INTS, INTS_OUT), cache=True, nogil=True)
def count_counts(counts: np.ndarray, numbers: np.ndarray) -> None:
    """Writes how many counts are 0, 1, 2, ... and below `numbers.size`."""
    numbers[:] = 0
    for count in counts:
        if 0 <= count < numbers.size:
            numbers[count] += 1


@numba.njit(
    numba.void(INTS, INTS, FLOATS, FLOATS, FLOATS, FLOATS_OUT, *RANGE),
    cache=True,
    nogil=True,
)
def fill_probs(
    counts: np.ndarray,
    offsets: np.ndarray,
    followed: np.ndarray,
    factors: np.ndarray,
    table: np.ndarray,
    probs: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Writes the discounted relative frequencies of the n-grams of some histories.

    Args:
      counts: `[n]`, counts of the n-grams.
      offsets: `[histories + 1]`, start of each history's n-grams.
      followed: `[histories]`, number of times that any symbol followed.
      factors: discount factor of each count; the last one is that of higher counts.
      table: rounded values of small counts (`order_counts.round_counts`); those of
        larger counts are in `probs`.
      probs: `[n]`, the result.
      begin: the first history.
      end: the history after the last one.
    """
    highest = factors.size - 1
    for history in range(begin, end):
        total = followed[history]
        for index in range(offsets[history], offsets[history + 1]):
            count = counts[index]
            stored = table[count] if 0 <= count < table.size else probs[index]
            probs[index] = stored * factors[max(0, min(count, highest))] / total
