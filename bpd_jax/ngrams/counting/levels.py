"""From sorted distinct windows to the n-grams of every order, in one pass.

What `windows` has sorted in memory, what lies in sorted runs on disk and what comes out
of a Beam pipeline all become counts here, so they are equal to the last bit.
"""

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax import progress
from bpd_jax.buckets import as_path
from bpd_jax.errors import UserError
from bpd_jax.ngrams.counting.windows import Packing, SortedWindows

# Windows that are taken apart at once.
_STEP = 1 << 18
# Counts below this are looked up.
_TABLE_SIZE = 1 << 16


class Levels(NamedTuple):
    """The n-grams of orders 1 ... K, as `counts.NGramCounts` has them.

    Attributes:
      keys: per order, `[n]` int64.
      counts: per order, `[n]` int64.
      followed: per order but the highest, `[n]` float64.
      seen: per order, how many n-grams there were before minimum counts.
    """

    keys: tuple[np.ndarray, ...]
    counts: tuple[np.ndarray, ...]
    followed: tuple[np.ndarray, ...]
    seen: tuple[int, ...]


def as_stored(counts: np.ndarray) -> np.ndarray:
    """Returns counts as OpenGrm's automata hold them, `[n]` float64.

    They hold the logarithm as a float32, off by up to 5e-7. A history that leaves its
    back-off a thousandth of its mass passes that on a thousandfold, so that agreement
    with OpenGrm beyond 1e-4 takes the same rounding.
    """
    with np.errstate(divide="ignore"):
        return np.exp(np.log(counts).astype(np.float32).astype(np.float64))


@functools.cache
def stored_table() -> np.ndarray:
    """Returns `as_stored` of the counts 0 ... 65,535."""
    return as_stored(np.arange(_TABLE_SIZE))


def sum_followed(
    keys: Sequence[np.ndarray], counts: Sequence[np.ndarray], width: int
) -> tuple[np.ndarray, ...]:
    """Returns per order but the highest how often anything followed each n-gram."""
    from bpd_jax.ngrams.counting import count_kernels

    followed = []
    for order in range(1, len(keys)):
        sums = np.zeros(keys[order - 1].size)
        count_kernels.sum_stored(
            keys[order] // width, counts[order], stored_table(), sums
        )
        followed.append(as_stored(sums))
    return tuple(followed)


def assemble(
    windows: SortedWindows,
    packing: Packing,
    min_counts: Sequence[int] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Levels:
    """Reads the n-grams of all orders off sorted distinct windows.

    Args:
      windows: of the whole text.
      packing: of the windows.
      min_counts: N numbers that never fall: n-grams seen less often are left out. Their
        prefixes and suffixes were seen at least as often as they, so what stays is
        closed. `followed` includes what is left out.
      folder: where to keep the arrays, which are then memory-mapped, or None for
        memory. Their size is that of the result: 24 bytes per n-gram, 16 for those of
        the highest order. Everything else takes some tens of megabytes.

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
            stored_table(),
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
                store.followed[level].append(as_stored(followed[level, :size]))

    try:
        for part in bar:
            for begin in range(0, len(part.rows), _STEP):
                split(*(array[begin : begin + _STEP] for array in part))
        split(np.empty((0, packing.words), np.uint64), np.empty(0, np.int64))
        return store.levels(state[2])
    finally:
        store.close()


class _Column:
    """An array that grows, in memory or in a file."""

    def __init__(self, dtype: type, most: int, path: pathlib.Path | None) -> None:
        self._path = path
        self._file = None if path is None else path.open("wb")
        # Memory that is never written is never taken.
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
        self.close()
        if self._path is not None and self.size:
            return np.asarray(np.memmap(self._path, self._array.dtype, "r"))
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

    def levels(self, seen: np.ndarray) -> Levels:
        """Returns the arrays; orders without n-grams, the highest, are left out."""
        present = sum(1 for column in self.keys if column.size)
        if not present:
            raise UserError("there is no text to count: the input is empty.")
        return Levels(
            keys=tuple(column.array() for column in self.keys[:present]),
            counts=tuple(column.array() for column in self.counts[:present]),
            followed=tuple(column.array() for column in self.followed[: present - 1]),
            seen=tuple(seen[seen > 0].tolist()),
        )

    def close(self) -> None:
        for column in (*self.keys, *self.counts, *self.followed):
            column.close()
