"""Packs pieces of documents into rows of equal length."""

from collections.abc import Iterable, Iterator

import numpy as np

# Maximum number of incomplete rows. More of them reduce padding and take more time.
_MAX_OPEN_ROWS = 64


def pack(
    pieces: Iterable[np.ndarray], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Packs pieces into rows by best fit.

    A row is yielded when it is full. If a piece fits into no open row and the maximum
    number of rows is open, the fullest one is yielded, padded at its end. Worked
    example for rows of length 4:

        pieces       1 2 3 | 4 5 6 7 | 8
        tokens       4 5 6 7,  1 2 3 8
        segment_ids  1 1 1 1,  1 1 1 2

    Args:
      pieces: `[n]` ids with 1 ≤ n ≤ length, or `[n, C]` with C values for each token.
        The id 0 is a token, not padding.
      length: tokens of a row, T.

    Yields:
      tokens `[T]` or `[T, C]` int32, and segment_ids `[T]` int32 (1, 2, ...; 0 is
      padding).
    """
    open_rows: list[list[np.ndarray]] = []
    free_positions: list[int] = []  # Number of free positions of each open row.
    for piece in pieces:
        fitting = [i for i, free in enumerate(free_positions) if free >= len(piece)]
        if fitting:
            best = min(fitting, key=free_positions.__getitem__)
            open_rows[best].append(piece)
            free_positions[best] -= len(piece)
        else:
            if len(open_rows) == _MAX_OPEN_ROWS:
                fullest = free_positions.index(min(free_positions))
                free_positions.pop(fullest)
                yield _row(open_rows.pop(fullest), length)
            open_rows.append([piece])
            free_positions.append(length - len(piece))
            best = len(free_positions) - 1
        if free_positions[best] == 0:
            free_positions.pop(best)
            yield _row(open_rows.pop(best), length)
    for row in open_rows:
        yield _row(row, length)


def pad(
    pieces: Iterable[np.ndarray], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a row for each piece, padded; arguments and results are as for `pack`."""
    for piece in pieces:
        yield _row([piece], length)


def _row(pieces: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((length, *pieces[0].shape[1:]), np.int32)
    segment_ids = np.zeros(length, np.int32)
    start = 0
    for number, piece in enumerate(pieces, start=1):
        end = start + len(piece)
        tokens[start:end] = piece
        segment_ids[start:end] = number
        start = end
    return tokens, segment_ids
