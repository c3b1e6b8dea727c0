"""Compiled loops over the arrays of `bpd_jax.ngrams.trie`.

Loops with `begin` and `end` process the extensions of the parents `begin ... end - 1`
only, so that threads can divide the work.
"""

import numba
import numpy as np
from numba import types

# Read-only contiguous arrays, which includes memory-mapped ones.
INTS = types.Array(types.int64, 1, "C", readonly=True)
FLOATS = types.Array(types.float64, 1, "C", readonly=True)
INTS_OUT = types.int64[::1]
FLOATS_OUT = types.float64[::1]
# The keys of one order, and the `child_offsets` of the order below.
LEVEL = types.UniTuple(INTS, 2)
RANGE = (types.int64, types.int64)

# Maximum ratio of the lengths of two sorted ranges that are merged by galloping search
# rather than by binary search.
_MAX_RATIO = 16


@numba.njit(types.void(INTS, types.int64, INTS_OUT), cache=True, nogil=True)
def fill_offsets(keys: np.ndarray, width: int, offsets: np.ndarray) -> None:
    """Writes the `child_offsets` of the parents, `[parents + 1]`."""
    index = 0
    for parent in range(offsets.size):
        first = parent * width
        while index < keys.size and keys[index] < first:
            index += 1
        offsets[parent] = index


@numba.njit(types.int64(INTS, *RANGE, types.int64), cache=True, nogil=True)
def lower_bound(keys: np.ndarray, begin: int, end: int, target: int) -> int:
    """Returns the first index from `begin` to `end` whose key is at least `target`."""
    while begin < end:
        middle = (begin + end) >> 1
        if keys[middle] < target:
            begin = middle + 1
        else:
            end = middle
    return begin


@numba.njit(
    types.void(LEVEL, LEVEL, INTS, types.int64, INTS_OUT, *RANGE),
    cache=True,
    nogil=True,
)
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


@numba.njit(
    types.void(INTS, INTS, INTS, INTS, types.int64, INTS_OUT), cache=True, nogil=True
)
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


@numba.njit(
    types.void(INTS, FLOATS, FLOATS, INTS, FLOATS_OUT, FLOATS_OUT, *RANGE),
    cache=True,
    nogil=True,
)
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
