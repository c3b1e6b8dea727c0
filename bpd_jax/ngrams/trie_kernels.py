"""Compiled loops over the arrays of `trie`: links, sums, Katz estimates, pruning.

Loops with `begin` and `end` process the extensions of the parents `begin ... end - 1`
only, so that threads can divide the work.
"""

import math

import numpy as np
from numba import types

from bpd_jax.ngrams.numba_kernels import njit

# Read-only contiguous arrays, which includes memory-mapped ones.
INTS = types.Array(types.int64, 1, "C", readonly=True)
FLOATS = types.Array(types.float64, 1, "C", readonly=True)
INTS_OUT = types.int64[::1]
FLOATS_OUT = types.float64[::1]
# The keys of one order, and the `child_offsets` of the order below.
LEVEL = types.UniTuple(INTS, 2)
FLOAT_PAIR = types.UniTuple(FLOATS, 2)
RANGE = (types.int64, types.int64)

# Maximum ratio of the lengths of two sorted ranges that are merged by galloping search
# rather than by binary search.
_MAX_RATIO = 16


@njit(types.void(INTS, types.int64, INTS_OUT))
def fill_offsets(keys: np.ndarray, width: int, offsets: np.ndarray) -> None:
    """Writes the `child_offsets` of the parents, `[parents + 1]`."""
    index = 0
    for parent in range(offsets.size):
        first = parent * width
        while index < keys.size and keys[index] < first:
            index += 1
        offsets[parent] = index


@njit(types.int64(INTS, *RANGE, types.int64))
def lower_bound(keys: np.ndarray, begin: int, end: int, target: int) -> int:
    """Returns the first index from `begin` to `end` whose key is at least `target`."""
    while begin < end:
        middle = (begin + end) >> 1
        if keys[middle] < target:
            begin = middle + 1
        else:
            end = middle
    return begin


@njit(types.void(LEVEL, LEVEL, INTS, types.int64, INTS_OUT, *RANGE))
def fill_suffix_links(
    level: tuple[np.ndarray, np.ndarray],
    lower: tuple[np.ndarray, np.ndarray],
    parent_links: np.ndarray,
    width: int,
    links: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Writes the suffix links of the n-grams of one order.

    The suffixes of a parent's extensions are extensions of the parent's suffix, and
    both lists are sorted, so one pass over the two finds all. A history with few
    extensions often has a suffix with thousands, so the pass uses binary search, and
    galloping search if the lists are of similar length.
    """
    keys, offsets = level
    lower_keys, lower_offsets = lower
    for parent in range(begin, end):
        suffix = parent_links[parent]
        if suffix < 0:
            links[offsets[parent] : offsets[parent + 1]] = -1
            continue
        index, last = lower_offsets[suffix], lower_offsets[suffix + 1]
        shift = (suffix - parent) * width
        first, end_child = offsets[parent], offsets[parent + 1]
        similar = last - index < _MAX_RATIO * (end_child - first)
        for child in range(first, end_child):
            target = keys[child] + shift
            limit = last
            if similar:
                step = 1
                while index + step < last and lower_keys[index + step] < target:
                    index += step
                    step *= 2
                limit = min(index + step, last)
            index = lower_bound(lower_keys, index, limit, target)
            exists = index < last and lower_keys[index] == target
            links[child] = index if exists else -1


@njit(types.void(INTS, INTS, INTS, INTS, types.int64, INTS_OUT))
def fill_children(
    keys: np.ndarray,
    offsets: np.ndarray,
    parents: np.ndarray,
    symbols: np.ndarray,
    width: int,
    indices: np.ndarray,
) -> None:
    """Writes the indices of `parents + symbols`, -1 for missing ones."""
    for query in range(parents.size):
        parent, symbol = parents[query], symbols[query]
        indices[query] = -1
        if parent >= 0 and symbol >= 0:
            target = parent * width + symbol
            last = offsets[parent + 1]
            index = lower_bound(keys, offsets[parent], last, target)
            if index < last and keys[index] == target:
                indices[query] = index


@njit(types.void(INTS, FLOATS, FLOATS, INTS, FLOATS_OUT, FLOATS_OUT, *RANGE))
def fill_child_sums(
    offsets: np.ndarray,
    values: np.ndarray,
    lower_values: np.ndarray,
    links: np.ndarray,
    sums: np.ndarray,
    lower_sums: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Writes the sums of the values of each parent's extensions and their suffixes."""
    for parent in range(begin, end):
        total = lower_total = 0.0
        for child in range(offsets[parent], offsets[parent + 1]):
            total += values[child]
            lower_total += lower_values[links[child]]
        sums[parent] = total
        lower_sums[parent] = lower_total


@njit(types.void(INTS, INTS, FLOATS, FLOATS, FLOATS, FLOATS_OUT, *RANGE))
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
      table: rounded values of small counts (`counts.round_counts`); those of
        larger counts are in `probs`.
      probs: `[n]`, the result.
    """
    highest = factors.size - 1
    for history in range(begin, end):
        total = followed[history]
        for index in range(offsets[history], offsets[history + 1]):
            count = counts[index]
            stored = table[count] if 0 <= count < table.size else probs[index]
            probs[index] = stored * factors[max(0, min(count, highest))] / total


@njit(
    types.void(
        INTS, INTS, FLOAT_PAIR, FLOAT_PAIR, FLOAT_PAIR, FLOATS, FLOATS_OUT, *RANGE
    )
)
def fill_relative_entropies(
    offsets: np.ndarray,
    links: np.ndarray,
    masses: tuple[np.ndarray, np.ndarray],
    level: tuple[np.ndarray, np.ndarray],
    lower: tuple[np.ndarray, np.ndarray],
    history_probs: np.ndarray,
    costs: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Writes D of every extension of the histories `begin ... end - 1`.

    Probabilities may be 0. An n-gram or history of probability 0 adds nothing to D; if
    only the suffix of an n-gram has probability 0, D is infinite.

    Args:
      offsets: the `trie.child_offsets` of the histories, `[h + 1]`.
      links: index of each n-gram's suffix in the order below, `[n]`.
      masses: the results of `backoff.left_over_masses`, `[h]` each.
      level: probabilities and log-probabilities of the n-grams, `[n]`.
      lower: the same of the order below.
      history_probs: P(h), `[h]`.
      costs: the result, `[n]`.
    """
    probs, log_probs = level
    lower_probs, lower_log_probs = lower
    for history in range(begin, end):
        mass, lower_mass = masses[0][history], masses[1][history]
        log_alpha = math.log(mass / lower_mass)
        for ngram in range(offsets[history], offsets[history + 1]):
            prob, suffix = probs[ngram], links[ngram]
            new = math.log((mass + prob) / (lower_mass + lower_probs[suffix]))
            change = mass * (new - log_alpha)
            if prob > 0:
                change += prob * (lower_log_probs[suffix] + new - log_probs[ngram])
            costs[ngram] = 0.0
            if history_probs[history] > 0:
                costs[ngram] = -history_probs[history] * change
