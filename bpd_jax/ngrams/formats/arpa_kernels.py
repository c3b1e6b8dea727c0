"""Compiled loops that join and parse the lines of ARPA files."""

import numba
import numpy as np
from numba import types

from bpd_jax.ngrams.trie_kernels import FLOATS_OUT, INTS, INTS_OUT

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_BYTES_OUT = types.uint8[::1]
# The concatenated bytes of all names, and the offset of each.
_NAMES = types.Tuple((_BYTES, INTS))

# Integers of 15 digits and powers of ten up to 10^22 are exact in float64.
_MAX_DIGITS, _MAX_POWER = 15, 22
_POWERS = 10.0 ** np.arange(_MAX_POWER + 1)

_TAB, _LINE, _BLANK = 9, 10, 32
_BLANKS = (_TAB, 13, _BLANK)
_PLUS, _MINUS, _POINT = 43, 45, 46
# Signed: combined with signed numbers, an unsigned one would become a float.
_ZERO = np.int64(48)
_EXPONENT = (69, 101)  # E, e
_OPEN, _CLOSE, _SLASH, _S = 60, 62, 47, 115

# Results for what is not a token id.
EOS, BOS, OTHER = -1, -2, -4
_ID_DIGITS = 9  # Longer ids may exceed int32.


@numba.njit(
    types.int64(_NAMES, types.int64, _BYTES_OUT, types.int64), cache=True, nogil=True
)
def _copy_word(
    words: tuple[np.ndarray, np.ndarray], number: int, text: np.ndarray, at: int
) -> int:
    """Copies a word to `text[at:]`; returns the index after its end."""
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
    """Writes one line per n-gram.

    Args:
      rows: the symbols, `[n, order]`, indices of `names`.
      scores: characters and offsets `[n + 1]` of the log-probabilities.
      weights: the same of the back-off weights; an empty one is omitted with its tab.
      names: the name of each symbol.
      text: output buffer, long enough for all lines.

    Returns:
      The length of the result.
    """
    at = 0
    for ngram in range(rows.shape[0]):
        at = _copy_word(scores, ngram, text, at)
        for index in range(rows.shape[1]):
            text[at] = _BLANK if index else _TAB
            at = _copy_word(names, rows[ngram, index], text, at + 1)
        if weights[1][ngram + 1] > weights[1][ngram]:
            text[at] = _TAB
            at = _copy_word(weights, ngram, text, at + 1)
        text[at] = _LINE
        at += 1
    return at


@numba.njit(types.int64(_BYTES, types.int64, types.int64), cache=True, nogil=True)
def _parse_symbol(text: np.ndarray, begin: int, end: int) -> int:
    """Parses a token id, `</s>` or `<s>`."""
    length = end - begin
    if text[begin] == _OPEN and text[end - 1] == _CLOSE:
        if length == 3 and text[begin + 1] == _S:
            return BOS
        if length == 4 and text[begin + 1] == _SLASH and text[begin + 2] == _S:
            return EOS
        return OTHER
    if length > _ID_DIGITS:
        return OTHER
    value = 0
    for at in range(begin, end):
        digit = text[at] - _ZERO
        if not 0 <= digit <= 9:
            return OTHER
        value = value * 10 + digit
    return value


@numba.njit(
    types.Tuple((types.boolean, types.float64))(_BYTES, types.int64, types.int64),
    cache=True,
    nogil=True,
)
def parse_number(text: np.ndarray, begin: int, end: int) -> tuple[bool, float]:
    """Parses a decimal number whose conversion to float64 is exact up to one rounding.

    Returns:
      Whether the text is such a number, and its value.
    """
    at = begin
    negative = at < end and text[at] == _MINUS
    if at < end and (negative or text[at] == _PLUS):
        at += 1
    # Value of the digits, number of digits without leading zeros, and of all digits.
    digits = significant = power = total = 0
    after_point = False
    while at < end:
        digit = text[at] - _ZERO
        if 0 <= digit <= 9:
            total += 1
            if significant or digit:
                significant += 1
            digits = digits * 10 + digit
            power -= after_point
            if significant > _MAX_DIGITS:
                return False, 0.0
        elif text[at] == _POINT and not after_point:
            after_point = True
        else:
            break
        at += 1
    if not total:
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
    if abs(power) > _MAX_POWER:
        return False, 0.0
    value = digits * _POWERS[power] if power > 0 else digits / _POWERS[-power]
    return True, -value if negative else value


@numba.njit(
    types.UniTuple(types.int64, 3)(
        _BYTES,
        types.int64,
        types.boolean,
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
    rows: np.ndarray,
    scores: np.ndarray,
    weights: np.ndarray,
    lines: np.ndarray,
) -> tuple[int, int, int]:
    """Parses lines of the usual form, and stops at the first line of another form.

    Args:
      text: lines of a file.
      at: index where the next line begins.
      may_have_weight: whether a back-off weight other than 0 may follow.
      rows: the result, token ids, `EOS` or `BOS`, `[n, order]`; at most n lines are
        parsed.
      scores: the result, log-probabilities to base 10, `[n]`.
      weights: the result, logarithms of back-off weights, by default 0, `[n]`.
      lines: the result, index of each n-gram's line among the parsed lines, `[n]`.

    Returns:
      Index where the first unparsed line begins; number of n-grams; number of parsed
      lines, including empty ones.
    """
    limit, order = rows.shape
    count = num_lines = 0
    begins = np.empty(order + 2, np.int64)
    ends = np.empty(order + 2, np.int64)
    while count < limit:
        # The fields of one line.
        position, fields = at, 0
        while position < text.size and text[position] != _LINE:
            if text[position] in _BLANKS:
                position += 1
                continue
            if fields == order + 2:
                return at, count, num_lines
            begins[fields] = position
            while position < text.size and text[position] != _LINE:
                if text[position] in _BLANKS:
                    break
                position += 1
            ends[fields] = position
            fields += 1
        if position == text.size:
            return at, count, num_lines
        if fields:
            if fields < order + 1:
                return at, count, num_lines
            parsed, score = parse_number(text, begins[0], ends[0])
            weight = 0.0
            if parsed and fields == order + 2:
                parsed, weight = parse_number(text, begins[order + 1], ends[order + 1])
            # At the highest order, only the weight 0 is valid.
            if not parsed or score > 0 or (weight != 0 and not may_have_weight):
                return at, count, num_lines
            for index in range(order):
                symbol = _parse_symbol(text, begins[index + 1], ends[index + 1])
                if symbol == OTHER:
                    return at, count, num_lines
                rows[count, index] = symbol
            scores[count] = score
            weights[count] = weight
            lines[count] = num_lines
            count += 1
        num_lines += 1
        at = position + 1
    return at, count, num_lines
