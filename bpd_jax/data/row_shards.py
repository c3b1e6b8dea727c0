"""Shards, read as one array, and the order of rows.

A shard is a folder of rows that was prepared separately: `shard-00000-of-01024`,
`shard-00001-of-01024`, …
"""

import collections
import pathlib
import re

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import open_npy
from bpd_jax.storage.paths import local_copy

# Maximum number of mapped files: each takes a file descriptor, of which a process
# usually has 1,024.
_MAX_OPEN_FILES = 128

# Of a `Permutation`.
_ROUNDS = 6
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def shard_name(index: int, count: int) -> str:
    """Folder name of a shard.

    >>> shard_name(3, 1024)
    'shard-00003-of-01024'
    """
    return f"shard-{index:05d}-of-{count:05d}"


def shard_folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders of all shards in `folder`, in order; empty if there are none."""
    counts = set()
    for shard in folder.glob("shard-*-of-*"):
        match = re.fullmatch(r"shard-\d{5,}-of-(\d{5,})", shard.name)
        if match:
            counts.add(int(match[1]))
    if not counts:
        return []
    if len(counts) > 1:
        raise UserError(
            f"{folder} holds shards of {' and of '.join(map(str, sorted(counts)))}: "
            "remove the shards with the wrong count."
        )
    (count,) = counts
    folders = [folder / shard_name(index, count) for index in range(count)]
    # In a bucket this is one request instead of one per shard.
    prepared = {path.parent for path in folder.rglob("rows.json")}
    missing = [path.name for path in folders if path not in prepared]
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing)} of {count} shards, the first being "
            f"{missing[0]}: prepare them, or copy them there."
        )
    return folders


class ShardedArray:
    """Several .npy files with arrays `[rows, length]`, read as one array.

    A file is mapped into memory when one of its rows is read; the least recently used
    files are unmapped. From a bucket, a file is first copied to the local disk, so that
    a host copies only the files that contain its rows.
    """

    def __init__(
        self, paths: list[pathlib.Path], rows: list[int], length: int, dtype: np.dtype
    ) -> None:
        """Initialises from the files and the number of rows of each."""
        self._paths = paths
        self._ends = np.cumsum(rows)
        self.dtype = dtype
        self.shape = (int(self._ends[-1]), length)
        self.size = self.shape[0] * self.shape[1]
        self._open: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: np.ndarray | slice) -> np.ndarray:
        """Returns a copy of the rows at `indices`."""
        if isinstance(indices, slice):
            indices = np.arange(*indices.indices(len(self)))
        indices = np.asarray(indices)
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"rows {indices} of {len(self)}")
        shards = np.searchsorted(self._ends, indices, side="right")
        rows = np.empty((len(indices), self.shape[1]), self.dtype)
        for shard in np.unique(shards):
            array = self._array(int(shard))
            selected = shards == shard
            rows[selected] = array[indices[selected] - (self._ends[shard] - len(array))]
        return rows

    def _array(self, shard: int) -> np.ndarray:
        if shard not in self._open:
            path = self._paths[shard]
            begin = self._ends[shard - 1] if shard else 0
            shape = (int(self._ends[shard] - begin), self.shape[1])
            try:
                array = open_npy(local_copy(path))
                if array.shape != shape or array.dtype != self.dtype:
                    raise ValueError(f"it is {array.shape} {array.dtype}")
            except (OSError, ValueError) as error:
                raise UserError(
                    f"cannot read {path}: {getattr(error, 'strerror', None) or error}; "
                    "remove the folder and prepare it again."
                ) from error
            self._open[shard] = array
            if len(self._open) > _MAX_OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]


class Permutation:
    """A pseudo-random permutation of 0 … size - 1, which needs no table.

    Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains": a Feistel network
    permutes the numbers of 2b bits. It is applied again to results that are too large
    (cycle walking), which gives a permutation of the smaller numbers.
    """

    def __init__(self, size: int, seed: tuple[int, ...]) -> None:
        """Draws the keys; `size` is at least 1."""
        self._size = np.uint64(size)
        # The domain is at most four times as large as `size`, so that walks are short.
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half)
        self._mask = np.uint64(2**half - 1)
        rng = np.random.default_rng(seed)
        self._keys = rng.integers(0, 2**64, _ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Returns the elements at `positions`; both are `[n]` int64."""
        result = self._network(np.asarray(positions).astype(np.uint64))
        while (outside := result >= self._size).any():
            result[outside] = self._network(result[outside])
        return result.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return left << self._half | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """Mixes the bits of numbers, as the finalizer of splitmix64."""
    values = (values ^ values >> np.uint64(30)) * _MIX[0]
    values = (values ^ values >> np.uint64(27)) * _MIX[1]
    return values ^ values >> np.uint64(31)
