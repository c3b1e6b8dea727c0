"""Computes the n-grams of all orders from sorted distinct windows, in one pass.

All ways of counting end here: windows sorted in memory, sorted runs on disk and the
output of a Beam pipeline. Therefore their counts are bitwise equal.
"""

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import IO, NamedTuple

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting.windows import Packing, SortedWindows
from bpd_jax.storage.paths import as_path

# Windows that are processed at once.
_STEP = 1 << 18
# Counts below this are looked up.
_TABLE_SIZE = 1 << 16


class OrderCounts(NamedTuple):
    """The n-grams of orders 1 ... K, as `counts.NGramCounts` has them.

    Attributes:
      keys: per order, `[n]` int64.
      counts: per order, `[n]` int64.
      followed: per order but the highest, `[n]` float64.
      seen: per order, number of n-grams before minimum counts.
    """

    keys: tuple[np.ndarray, ...]
    counts: tuple[np.ndarray, ...]
    followed: tuple[np.ndarray, ...]
    seen: tuple[int, ...]


def round_counts(counts: np.ndarray) -> np.ndarray:
    """Rounds counts as OpenGrm's automata do, `[n]` float64.

    The automata store the logarithm as a float32, with an error of up to 5e-7. If a
    history leaves a thousandth of its mass to its back-off, this error is multiplied by
    a thousand, so that results closer to OpenGrm's than 1e-4 need the same rounding.
    """
    with np.errstate(divide="ignore"):
        return np.exp(np.log(counts).astype(np.float32).astype(np.float64))


@functools.cache
def rounded_counts_table() -> np.ndarray:
    """Returns `round_counts` of the counts 0 ... 65,535."""
    return round_counts(np.arange(_TABLE_SIZE))


def sum_followed(
    keys: Sequence[np.ndarray], counts: Sequence[np.ndarray], width: int
) -> tuple[np.ndarray, ...]:
    """Sums the counts of the extensions of each n-gram, for all orders but the last."""
    from bpd_jax.ngrams.counting import count_kernels

    followed = []
    for order in range(1, len(keys)):
        sums = np.zeros(keys[order - 1].size)
        count_kernels.sum_rounded(
            keys[order] // width, counts[order], rounded_counts_table(), sums
        )
        followed.append(round_counts(sums))
    return tuple(followed)


def assemble(
    windows: SortedWindows,
    packing: Packing,
    min_counts: Sequence[int] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> OrderCounts:
    """Computes the n-grams of all orders from sorted distinct windows.

    Args:
      windows: windows of the complete text.
      packing: packing of the windows.
      min_counts: lowest count of each order, N non-decreasing numbers. Prefixes and
        suffixes of an n-gram are at least as frequent, so that they are kept too.
        `followed` includes dropped n-grams.
      folder: folder of the arrays, which are then memory-mapped; None for memory. They
        take 24 bytes per n-gram, and 16 for the highest order. Everything else takes
        some tens of megabytes.

    Raises:
      UserError: there are no windows.
      OSError: the folder cannot be written.
    """
    from bpd_jax.ngrams.counting import count_kernels

    order = packing.order
    minimums = np.array(min_counts or [1] * order, np.int64)
    state = np.zeros((4, order), np.int64)
    following = np.zeros(order)
    previous = np.zeros(packing.words, np.uint64)
    keys = np.empty((order, _STEP + 1), np.int64)
    numbers = np.empty_like(keys)
    followed = np.empty(keys.shape)
    store = _Store(order, windows.most, None if folder is None else as_path(folder))
    bar = progress.bar(
        windows.parts, label="count", total=windows.number, unit=" parts"
    )

    def split(rows: np.ndarray, counts: np.ndarray) -> None:
        written = count_kernels.split_orders(
            rows,
            counts,
            packing.lengths,
            packing.bases,
            minimums,
            rounded_counts_table(),
            state,
            following,
            previous,
            keys,
            numbers,
            followed,
        )
        for level, size in enumerate(written.tolist()):
            store.keys[level].append(keys[level, :size])
            store.counts[level].append(numbers[level, :size])
            if level + 1 < order:
                store.followed[level].append(round_counts(followed[level, :size]))

    try:
        for part in bar:
            for begin in range(0, len(part.rows), _STEP):
                split(*(array[begin : begin + _STEP] for array in part))
        split(np.empty((0, packing.words), np.uint64), np.empty(0, np.int64))
        return store.order_counts(state[2])
    finally:
        store.close()


class _Column:
    """A growing array in memory or in a file."""

    def __init__(self, dtype: type, most: int, path: pathlib.Path | None) -> None:
        self._file: IO[bytes] | None = None
        if path is not None:
            # Another process may have mapped the file of an earlier count.
            path.unlink(missing_ok=True)
            self._file = path.open("x+b")
        # The operating system allocates only the pages that are written.
        self._array: np.ndarray = np.empty(0 if path else most, dtype)
        self.size = 0

    def append(self, values: np.ndarray) -> None:
        size = self.size + values.size
        if self._file is not None:
            self._file.write(values.data)
        else:
            self._array[self.size : size] = values
        self.size = size

    def array(self) -> np.ndarray:
        if self._file is not None and self.size:
            return np.asarray(np.memmap(self._file, self._array.dtype, "r"))
        return self._array[: self.size]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Store:
    """The columns of all orders."""

    def __init__(self, order: int, most: int, folder: pathlib.Path | None) -> None:
        def columns(name: str, number: int, dtype: type) -> list[_Column]:
            paths = [folder and folder / f"{name}_{n + 1}.bin" for n in range(number)]
            return [_Column(dtype, most, path) for path in paths]

        self.keys = columns("keys", order, np.int64)
        self.counts = columns("counts", order, np.int64)
        self.followed = columns("followed", order - 1, np.float64)

    def order_counts(self, seen: np.ndarray) -> OrderCounts:
        """Returns the arrays; orders without n-grams, the highest, are left out."""
        present = sum(1 for column in self.keys if column.size)
        if not present:
            raise UserError("there is no text to count: the input is empty.")
        return OrderCounts(
            keys=tuple(column.array() for column in self.keys[:present]),
            counts=tuple(column.array() for column in self.counts[:present]),
            followed=tuple(column.array() for column in self.followed[: present - 1]),
            seen=tuple(seen[seen > 0].tolist()),
        )

    def close(self) -> None:
        for column in (*self.keys, *self.counts, *self.followed):
            column.close()
