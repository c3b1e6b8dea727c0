"""A compiled loop that joins the lines of ARPA files."""

import numpy as np
from numba import types

from bpd_jax.ngrams.numba_kernels import njit
from bpd_jax.ngrams.trie_kernels import INTS

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_BYTES_OUT = types.uint8[::1]
# The concatenated bytes of all names, and the offset of each.
_NAMES = types.Tuple((_BYTES, INTS))

_TAB, _LINE, _BLANK = 9, 10, 32


@njit(types.int64(_NAMES, types.int64, _BYTES_OUT, types.int64))
def _copy_word(
    words: tuple[np.ndarray, np.ndarray], number: int, text: np.ndarray, at: int
) -> int:
    """Copies a word to `text[at:]`; returns the index after its end."""
    letters, begins = words
    for letter in range(begins[number], begins[number + 1]):
        text[at] = letters[letter]
        at += 1
    return at


@njit(types.int64(types.int32[:, ::1], _NAMES, _NAMES, _NAMES, _BYTES_OUT))
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
