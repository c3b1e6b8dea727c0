"""Compiled inner loops of counting; see `windows` and `counts`."""

import math
from typing import Any

import numpy as np

from bpd_jax.ngrams.numba_kernels import njit

_DIGIT_BITS = 11  # of one pass of the radix sort


@njit()
def fill_windows(
    stream: np.ndarray,
    bases: np.ndarray,
    eos: int,
    part_of: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
) -> None:
    """Packs the window of every position of a stream and sorts windows into parts.

    The window of a position is that of the next position, shifted by one digit to the
    right, with the symbol of the position in front. Therefore the stream is processed
    from its end.

    Args:
      stream: `[T]` int32 symbols, complete sequences.
      bases: `[W + 1]` uint64: entry 0 is the base b, entry w + 1 the weight of the
        first digit of word w.
      eos: the symbol after which windows are empty.
      part_of: `[symbols]`, part of the windows that begin with a symbol.
      places: `[parts]` int64, start of each part in `rows`; modified.
      rows: `[T, W]` uint64, the result.
    """
    words = rows.shape[1]
    base = bases[0]
    window = np.zeros(words, np.uint64)
    for index in range(stream.size - 1, -1, -1):
        symbol = stream[index]
        if symbol == eos:
            window[:] = 0
        digit = np.uint64(symbol + 1)
        part = part_of[symbol]
        slot = places[part]
        places[part] = slot + 1
        for word in range(words):
            rest = window[word] // base
            leaving = window[word] - rest * base
            window[word] = digit * bases[word + 1] + rest
            rows[slot, word] = window[word]
            digit = leaving


@njit()
def radix_sort(rows: np.ndarray) -> None:
    """Sorts rows of words `[n, W]` uint64 in place, the last digit first."""
    n, words = rows.shape
    size = 1 << _DIGIT_BITS
    mask = np.uint64(size - 1)
    source, target = rows, np.empty_like(rows)
    starts = np.empty(size, np.int64)
    for word in range(words - 1, -1, -1):
        for low in range(0, 64, _DIGIT_BITS):
            shift = np.uint64(low)
            starts[:] = 0
            for index in range(n):
                starts[(source[index, word] >> shift) & mask] += 1
            total = 0
            constant = False
            for bucket in range(size):
                number = starts[bucket]
                constant |= number == n
                starts[bucket] = total
                total += number
            if constant:  # All rows have the same digit.
                continue
            for index in range(n):
                digit = (source[index, word] >> shift) & mask
                slot = starts[digit]
                starts[digit] = slot + 1
                for column in range(words):
                    target[slot, column] = source[index, column]
            source, target = target, source
    if source is not rows:
        rows[:] = source


@njit()
def count_equal(rows: np.ndarray, counts: np.ndarray) -> int:
    """Moves the distinct rows of sorted rows `[n, W]` to the front.

    Args:
      rows: sorted rows; modified.
      counts: `[n]`, the result: number of occurrences of each distinct row.

    Returns:
      The number of distinct rows.
    """
    n, words = rows.shape
    last = -1
    for index in range(n):
        same = last >= 0
        for word in range(words):
            same = same and rows[index, word] == rows[last, word]
        if same:
            counts[last] += 1
        else:
            last += 1
            counts[last] = 1
            for word in range(words):
                rows[last, word] = rows[index, word]
    return last + 1


@njit()
def merge(
    rows_a: np.ndarray,
    counts_a: np.ndarray,
    rows_b: np.ndarray,
    counts_b: np.ndarray,
    rows: np.ndarray,
    counts: np.ndarray,
) -> int:
    """Merges two sorted lists of distinct rows; the counts of equal rows add up.

    Returns:
      The number of rows written to `rows` and `counts`.
    """
    words = rows.shape[1]
    a, b, written = 0, 0, 0
    while a < counts_a.size or b < counts_b.size:
        order = 0  # -1: take a; 1: take b; 0: they are equal
        if b == counts_b.size:
            order = -1
        elif a == counts_a.size:
            order = 1
        else:
            for word in range(words):
                if rows_a[a, word] != rows_b[b, word]:
                    order = -1 if rows_a[a, word] < rows_b[b, word] else 1
                    break
        counts[written] = 0
        if order >= 0:
            rows[written] = rows_b[b]
            counts[written] += counts_b[b]
            b += 1
        if order <= 0:
            rows[written] = rows_a[a]
            counts[written] += counts_a[a]
            a += 1
        written += 1
    return written


@njit()
def _rounded(count: int, table: np.ndarray) -> float:
    """`counts.round_counts` of one count; `table` has those of small counts."""
    if count < table.size:
        return table[count]
    return math.exp(np.float64(np.float32(math.log(count))))


@njit()
def split_orders(
    rows: np.ndarray,
    counts: np.ndarray,
    lengths: np.ndarray,
    bases: np.ndarray,
    minimums: np.ndarray,
    table: np.ndarray,
    state: np.ndarray,
    following: np.ndarray,
    previous: np.ndarray,
    keys: np.ndarray,
    numbers: np.ndarray,
    followed: np.ndarray,
) -> np.ndarray:
    """Computes the n-grams of all orders from sorted distinct windows.

    An n-gram is complete, and written, at the first window that does not begin with it;
    until then it is open. The windows may be split over several calls; a call without
    windows completes all n-grams.

    Args:
      rows: `[n, W]` uint64.
      counts: `[n]`.
      lengths: `[W]`, number of digits of each word; their sum is N.
      bases: see `fill_windows`.
      minimums: `[N]`, lowest count of an n-gram to be written; non-decreasing.
      table: see `_rounded`.
      state: `[4, N]` int64, kept between calls: digits of the last window, counts of
        open n-grams, n-grams completed so far, n-grams written so far.
      following: `[N]` float64, kept between calls: sum of the extensions of each open
        n-gram.
      previous: `[W]` uint64, kept between calls: the last window.
      keys, numbers: `[N, n + 1]` int64, the results: keys (see `trie`) and counts.
      followed: `[N, n + 1]` float64, the result: the sums of `following`.

    Returns:
      `[N]`, number of n-grams of each order that were written.
    """
    n, words = rows.shape
    order = minimums.size
    base = bases[0]
    width = np.int64(base) - 1
    digits, opened, completed, retained = state[0], state[1], state[2], state[3]
    fresh = np.zeros(order, np.int64)
    written = np.zeros(order, np.int64)
    for index in range(max(n, 1)):
        # The first digit in which this window differs from the last one.
        first = 0
        if n > 0:
            first, begin, differs = order, 0, False
            for word in range(words):
                value, old = rows[index, word], previous[word]
                begin += lengths[word]
                if not differs and value == old:
                    continue
                slot = begin - 1
                while slot >= begin - lengths[word]:
                    if not differs and value == old:
                        break
                    rest = value // base
                    fresh[slot] = np.int64(value - rest * base)
                    value = rest
                    old //= base
                    slot -= 1
                if not differs:
                    first = slot + 1
                    differs = True
                previous[word] = rows[index, word]
        for level in range(order - 1, first - 1, -1):
            count = opened[level]
            if count == 0:
                continue
            completed[level] += 1
            if level > 0:
                following[level - 1] += _rounded(count, table)
            if count >= minimums[level]:
                slot = written[level]
                parent = retained[level - 1] if level > 0 else 0
                keys[level, slot] = parent * width + digits[level] - 1
                numbers[level, slot] = count
                followed[level, slot] = following[level]
                written[level] = slot + 1
                retained[level] += 1
            opened[level] = 0
            following[level] = 0.0
        if n > 0:
            for level in range(first, order):
                digits[level] = fresh[level]
            for level in range(order):
                if digits[level] == 0:
                    break
                opened[level] += counts[index]
    return written


@njit()
def parse_numbers(
    text: np.ndarray,
    numbers: np.ndarray,
    lengths: np.ndarray,
    highest: int,
) -> tuple[int, int, int]:
    """Parses lines of decimal numbers separated by blanks.

    Args:
      text: `[n]` uint8; complete lines.
      numbers: integers, the result: the numbers of all lines.
      lengths: int64, the result: how many numbers each line has; 0 if it is empty.
      highest: the highest number that is valid.

    Returns:
      How many numbers and lines were written, and 1 if the line after these is invalid.
    """
    written, lines, length = 0, 0, 0
    value: Any = np.int64(0)
    inside = False
    index = 0
    while index <= text.size:
        # The last line may lack a line end.
        byte = text[index] if index < text.size else np.uint8(10)
        if 48 <= byte <= 57 and value >= 0:
            value = value * 10 + (byte - 48)
            inside = True
            if value > highest:
                return written, lines, 1
        elif byte == 32 or 9 <= byte <= 13:
            if inside:
                numbers[written + length] = value
                length += 1
                value, inside = np.int64(0), False
            if byte == 10 and (index < text.size or length):
                written += length
                lengths[lines] = length
                lines += 1
                length = 0
        else:
            return written, lines, 1
        index += 1
    return written, lines, 0
