"""Packing pieces of documents into rows of one length. Needs only numpy."""

from collections.abc import Iterable, Iterator

import numpy as np

# Number of open rows. More open rows waste less padding and take more time.
_OPEN_ROWS = 64


def pack(
    pieces: Iterable[np.ndarray], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Packs pieces into rows by best fit.

    A row is yielded when it is full. If a piece fits into no row and enough rows are
    open, the fullest one is yielded with padding at its end. With rows of length 4:

        pieces       1 2 3 | 4 5 6 7 | 8
        tokens       4 5 6 7,  1 2 3 8
        segment_ids  1 1 1 1,  1 1 1 2

    Args:
      pieces: `[n]` ids with 1 ≤ n ≤ length; every id is a token, 0 too. Or `[n, C]`,
        with C values for each token.
      length: tokens of a row, T.

    Yields:
      tokens `[T]` or `[T, C]` int32, and segment_ids `[T]` int32 (1, 2, ...; 0 is
      padding).
    """
    waiting: list[list[np.ndarray]] = []
    free_positions: list[int] = []  # Free positions of each waiting row.
    for piece in pieces:
        fitting = [i for i, free in enumerate(free_positions) if free >= len(piece)]
        if fitting:
            best = min(fitting, key=free_positions.__getitem__)
            waiting[best].append(piece)
            free_positions[best] -= len(piece)
        else:
            if len(waiting) == _OPEN_ROWS:
                fullest = free_positions.index(min(free_positions))
                free_positions.pop(fullest)
                yield _row(waiting.pop(fullest), length)
            waiting.append([piece])
            free_positions.append(length - len(piece))
            best = len(free_positions) - 1
        if free_positions[best] == 0:
            free_positions.pop(best)
            yield _row(waiting.pop(best), length)
    for row in waiting:
        yield _row(row, length)


def pad(
    pieces: Iterable[np.ndarray], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Puts every piece into its own row; arguments and results as for `pack`."""
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
