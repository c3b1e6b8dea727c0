"""Compiled loops that join and parse the lines of ARPA files."""

from typing import Any

import numba
import numpy as np
from numba import types

from bpd_jax.ngrams.trie_kernels import FLOATS_OUT, INTS, INTS_OUT

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_BYTES_OUT = types.uint8[::1]
# Bytes of all names one after the other, and where each begins.
_NAMES = types.Tuple((_BYTES, INTS))
_TABLE = types.Array(types.int32, 1, "C", readonly=True)

_MOST_DIGITS = 15  # Integers of so many digits are exact in float64.
_MOST_POWER = 22
_POWERS = 10.0 ** np.arange(_MOST_POWER + 1)

_TAB, _LINE, _BLANK = 9, 10, 32
_BLANKS = (_TAB, 13, _BLANK)
_PLUS, _MINUS, _POINT = 43, 45, 46
# Signed: combined with signed numbers, an unsigned one would become a float.
_ZERO = np.int64(48)
_EXPONENT = (69, 101)  # E, e


@numba.njit(
    types.int64(_NAMES, types.int64, _BYTES_OUT, types.int64), cache=True, nogil=True
)
def _put(
    words: tuple[np.ndarray, np.ndarray], number: int, text: np.ndarray, at: int
) -> int:
    """Copies one of the words; returns the index after its end."""
    letters, begins = words
    for letter in range(begins[number], begins[number + 1]):
        text[at] = letters[letter]
        at += 1
    return at


@numba.njit(
    types.int64(types.int32[:, ::1], _NAMES, _NAMES, _NAMES, _BYTES_OUT),
    cache=True,
    nogil=True,
)
def join_lines(
    rows: np.ndarray,
    scores: tuple[np.ndarray, np.ndarray],
    weights: tuple[np.ndarray, np.ndarray],
    names: tuple[np.ndarray, np.ndarray],
    text: np.ndarray,
) -> int:
    """Writes one line per n-gram, unless the buffer is too small.

    Args:
      rows: the symbols, `[n, order]`, indices of `names`.
      scores: their log-probabilities as text, and where each begins, `[n + 1]`.
      weights: their back-off weights likewise; an empty one is left out with its tab.
      names: the name of each symbol.
      text: output buffer.

    Returns:
      The length of the result; -1 if the buffer is too small.
    """
    needed = scores[0].size + weights[0].size
    for ngram in range(rows.shape[0]):
        needed += weights[1][ngram + 1] > weights[1][ngram]
        for index in range(rows.shape[1]):
            symbol = rows[ngram, index]
            needed += names[1][symbol + 1] - names[1][symbol] + 1
        needed += 1
    if needed > text.size:
        return -1
    at = 0
    for ngram in range(rows.shape[0]):
        at = _put(scores, ngram, text, at)
        for index in range(rows.shape[1]):
            text[at] = _BLANK if index else _TAB
            at = _put(names, rows[ngram, index], text, at + 1)
        if weights[1][ngram + 1] > weights[1][ngram]:
            text[at] = _TAB
            at = _put(weights, ngram, text, at + 1)
        text[at] = _LINE
        at += 1
    return at


@numba.njit(types.int64(_BYTES, types.int64, types.int64), cache=True, nogil=True)
def _hash(text: np.ndarray, begin: int, end: int) -> Any:
    value = np.uint64(14695981039346656037)  # FNV-1a
    for at in range(begin, end):
        value = (value ^ np.uint64(text[at])) * np.uint64(1099511628211)
    return np.int64(value >> np.uint64(1))


@numba.njit(
    types.int64(_BYTES, types.int64, types.int64, _NAMES, _TABLE),
    cache=True,
    nogil=True,
)
def _look_up(
    text: np.ndarray,
    begin: int,
    end: int,
    names: tuple[np.ndarray, np.ndarray],
    table: np.ndarray,
) -> int:
    """Returns the slot of a name in the table, or the empty slot for it."""
    letters, begins = names
    slot = _hash(text, begin, end) % table.size
    while table[slot] >= 0:
        first = begins[table[slot]]
        if begins[table[slot] + 1] - first == end - begin:
            same = True
            for place in range(end - begin):
                if letters[first + place] != text[begin + place]:
                    same = False
                    break
            if same:
                return slot
        slot = (slot + 1) % table.size
    return slot


@numba.njit(types.void(_NAMES, types.int32[::1]), cache=True, nogil=True)
def fill_table(names: tuple[np.ndarray, np.ndarray], table: np.ndarray) -> None:
    """Fills a hash table, all -1 and larger than the number of names."""
    letters, begins = names
    for name in range(begins.size - 1):
        table[_look_up(letters, begins[name], begins[name + 1], names, table)] = name


@numba.njit(
    types.Tuple((types.boolean, types.float64))(_BYTES, types.int64, types.int64),
    cache=True,
    nogil=True,
)
def parse_number(text: np.ndarray, begin: int, end: int) -> tuple[bool, float]:
    """Returns whether this is a plain decimal number, and the closest float64."""
    at = begin
    negative = at < end and text[at] == _MINUS
    if at < end and (negative or text[at] == _PLUS):
        at += 1
    digits = number = power = seen = 0
    after_point = False
    while at < end:
        digit = text[at] - _ZERO
        if 0 <= digit <= 9:
            seen += 1
            if number or digit:
                number += 1
            digits = digits * 10 + digit
            power -= after_point
            if number > _MOST_DIGITS:
                return False, 0.0
        elif text[at] == _POINT and not after_point:
            after_point = True
        else:
            break
        at += 1
    if not seen:
        return False, 0.0
    if at < end:
        if text[at] != _EXPONENT[0] and text[at] != _EXPONENT[1]:
            return False, 0.0
        at += 1
        down = at < end and text[at] == _MINUS
        if at < end and (down or text[at] == _PLUS):
            at += 1
        if at == end or end - at > 3:
            return False, 0.0
        exponent = 0
        while at < end:
            digit = text[at] - _ZERO
            if not 0 <= digit <= 9:
                return False, 0.0
            exponent = exponent * 10 + digit
            at += 1
        power += -exponent if down else exponent
    if abs(power) > _MOST_POWER:
        return False, 0.0
    value = digits * _POWERS[power] if power > 0 else digits / _POWERS[-power]
    return True, -value if negative else value


@numba.njit(
    types.UniTuple(types.int64, 3)(
        _BYTES,
        types.int64,
        types.boolean,
        _NAMES,
        _TABLE,
        types.int32[:, ::1],
        FLOATS_OUT,
        FLOATS_OUT,
        INTS_OUT,
    ),
    cache=True,
    nogil=True,
)
def parse_ngrams(
    text: np.ndarray,
    at: int,
    may_have_weight: bool,
    names: tuple[np.ndarray, np.ndarray],
    table: np.ndarray,
    rows: np.ndarray,
    scores: np.ndarray,
    weights: np.ndarray,
    lines: np.ndarray,
) -> tuple[int, int, int]:
    """Reads ordinary lines and stops at the first that is anything else.

    Args:
      text: lines of a file.
      at: index where the next line begins.
      may_have_weight: whether a back-off weight may follow.
      names: the names of the unigrams.
      table: their hash table, see `fill_table`.
      rows: the result, names by number, `[n, order]`; at most n lines are read.
      scores: the result, numbers as in the file, `[n]`.
      weights: the result, 0 where there is none, `[n]`.
      lines: the result, the place of each among the lines read, `[n]`.

    Returns:
      Index where the first unread line begins; number of n-grams; number of lines,
      including empty ones.
    """
    most, order = rows.shape
    count = passed = 0
    begins = np.empty(order + 2, np.int64)
    ends = np.empty(order + 2, np.int64)
    while count < most:
        # The fields of one line.
        position, fields = at, 0
        while position < text.size and text[position] != _LINE:
            if text[position] in _BLANKS:
                position += 1
                continue
            if fields == order + 2:
                return at, count, passed
            begins[fields] = position
            while position < text.size and text[position] != _LINE:
                if text[position] in _BLANKS:
                    break
                position += 1
            ends[fields] = position
            fields += 1
        if position == text.size:
            return at, count, passed
        if fields:
            if fields < order + 1 or (fields == order + 2 and not may_have_weight):
                return at, count, passed
            good, score = parse_number(text, begins[0], ends[0])
            weight = 0.0
            if good and fields == order + 2:
                good, weight = parse_number(text, begins[order + 1], ends[order + 1])
            if not good or score > 0:
                return at, count, passed
            for symbol in range(order):
                slot = _look_up(
                    text, begins[symbol + 1], ends[symbol + 1], names, table
                )
                if table[slot] < 0:
                    return at, count, passed
                rows[count, symbol] = table[slot]
            scores[count] = score
            weights[count] = weight
            lines[count] = passed
            count += 1
        passed += 1
        at = position + 1
    return at, count, passed
