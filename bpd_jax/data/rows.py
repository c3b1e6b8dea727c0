"""Token files: packed rows on disk, and batches of them. Needs only numpy.

A folder of rows holds `tokens.npy` and `segment_ids.npy`, both `[rows, length]`,
`rows.json` that describes them, and the vocabulary as `tokenizer.json`. Segments of
a row are numbered 1, 2, ...; 0 marks padding at the row's end. If some tokens are
context only, `loss_mask.npy` (bool) marks the others. A folder may also contain several
such folders (`row_shards`).
"""

import collections
import concurrent.futures
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bpd_jax import array_files
from bpd_jax.artifacts import Artifact
from bpd_jax.buckets import BucketPath, as_path
from bpd_jax.data.permutation import Permutation
from bpd_jax.data.row_shards import ShardedArray, shard_folders
from bpd_jax.errors import UserError

HEADER, LOSS_MASK = "rows.json", "loss_mask.npy"

KIND = Artifact(
    "token files",
    HEADER,
    ("tokens.npy", "segment_ids.npy", LOSS_MASK, "tokenizer.json"),
    '"end_of_text"',
    remedy="remove the folder and prepare it again",
)
_FIELDS = {
    "rows": int,
    "length": int,
    "tokens": int,
    "documents": int,
    "split": str,
    "vocabulary": str,
    "vocab_size": int,
    "end_of_text": int,
    "fingerprint": dict,
}

_OPENED_AT_ONCE = 16  # shards
_NPY_HEADER = 128  # bytes, of an array of two axes

# The order of this many rows is a table of 64 MB; that of more rows is computed.
_LARGEST_TABLE = 1 << 23


class Batch(NamedTuple):
    """Rows for one step of training; a pytree of host arrays.

    Attributes:
      tokens: `[B, T]` int32; 0 where there is padding (0 is also a real token).
      segment_ids: `[B, T]` int32; 1, 2, ... in each row, 0 is padding.
      positions: `[B, T]` int32; counts from 0 in each segment, 0 on padding.
      loss_mask: `[B, T]` bool; true for every token in the loss: every real token,
        unless some are context only.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    loss_mask: np.ndarray


def segment_positions(segment_ids: np.ndarray) -> np.ndarray:
    """Returns positions `[..., T]` int32 that restart at 0 in each segment.

    >>> segment_positions(np.array([[1, 1, 1, 2, 2, 0, 0]])).tolist()
    [[0, 1, 2, 0, 1, 0, 0]]
    """
    index = np.arange(segment_ids.shape[-1], dtype=np.int32)
    starts = np.zeros(segment_ids.shape, np.int32)
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    starts[..., 1:] = np.where(changes, index[1:], 0)
    positions = index - np.maximum.accumulate(starts, axis=-1)
    return np.where(segment_ids == 0, 0, positions)


def make_batch(
    tokens: np.ndarray, segment_ids: np.ndarray, loss_mask: np.ndarray | None = None
) -> Batch:
    """Returns the `Batch` of rows given by its fields, `[B, T]`; see `Batch`."""
    segment_ids = np.asarray(segment_ids, np.int32)
    if loss_mask is None:
        loss_mask = segment_ids != 0
    return Batch(
        tokens=np.asarray(tokens, np.int32),
        segment_ids=segment_ids,
        positions=segment_positions(segment_ids),
        loss_mask=np.asarray(loss_mask),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
    """The rows of one split, mapped into memory.

    Attributes:
      folder: the folder; it is also a valid `TextTask.vocabulary`.
      tokens: `[rows, length]` uint16 or int32.
      segment_ids: `[rows, length]` uint16.
      loss_mask: `[rows, length]` bool; None if every token is in the loss.
      length: tokens of a row, T.
      num_tokens: tokens of all rows, padding not counted.
      num_documents: number of documents or examples.
      split: `train` or `validation`.
      vocabulary: `TextTask.vocabulary` of the task.
      vocab_size: number of token ids, V.
      end_of_text: id of the token that ends each document and, in text, begins it.
      fingerprint: description of the source and settings; equal rows have equal ones.
      cut: counts of what did not fit; see `example_pieces.Cut`. Empty for documents.
    """

    folder: pathlib.Path
    tokens: np.ndarray | ShardedArray
    segment_ids: np.ndarray | ShardedArray
    loss_mask: np.ndarray | ShardedArray | None
    length: int
    num_tokens: int
    num_documents: int
    split: str
    vocabulary: str
    vocab_size: int
    end_of_text: int
    fingerprint: dict[str, Any]
    cut: dict[str, int] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def waste(self) -> float:
        """Share of the positions that are padding."""
        return 1 - self.num_tokens / self.tokens.size

    def batch(self, indices: np.ndarray | slice) -> Batch:
        """Returns the rows at `indices`, any number of them."""
        mask = None if self.loss_mask is None else self.loss_mask[indices]
        return make_batch(self.tokens[indices], self.segment_ids[indices], mask)


def open_rows(folder: str | os.PathLike[str]) -> PackedRows:
    """Opens a folder of rows, or of shards; no row is read until it is used.

    Raises:
      UserError: the folder is missing, incomplete, or of another version.
    """
    folder = as_path(folder)
    shards = shard_folders(folder)
    if shards:
        return _joined(folder, shards)
    about = KIND.read_header(folder, _FIELDS)
    shape = (about["rows"], about["length"])
    return PackedRows(
        folder=folder,
        tokens=_open_array(folder / "tokens.npy", shape, (np.uint16, np.int32)),
        segment_ids=_open_array(folder / "segment_ids.npy", shape, (np.uint16,)),
        loss_mask=(
            _open_array(folder / LOSS_MASK, shape, (np.bool_,))
            if about.get("loss_mask")
            else None
        ),
        length=about["length"],
        num_tokens=about["tokens"],
        num_documents=about["documents"],
        split=about["split"],
        vocabulary=about["vocabulary"],
        vocab_size=about["vocab_size"],
        end_of_text=about["end_of_text"],
        fingerprint=about["fingerprint"],
        cut=about.get("cut", {}),
    )


def _joined(folder: pathlib.Path, paths: list[pathlib.Path]) -> PackedRows:
    """The rows of all shards together."""
    first = open_rows(paths[0])
    counts, tokens, documents = [], 0, 0
    cut: collections.Counter[str] = collections.Counter()
    common = _without_shard(first)
    with concurrent.futures.ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
        parts = list(pool.map(_without_arrays, paths))
    for path, part in zip(paths, parts, strict=True):
        for name, value in _without_shard(part).items():
            if value != common.get(name):
                raise UserError(
                    f"{path} does not belong to {paths[0]}: {name} is {value!r} here "
                    f"and {common.get(name)!r} there."
                )
        counts.append(len(part))
        tokens += part.num_tokens
        documents += part.num_documents
        cut.update(part.cut)

    def join(name: str, like: Any) -> ShardedArray:
        files = [path / name for path in paths]
        return ShardedArray(files, counts, first.length, like.dtype)

    return dataclasses.replace(
        first,
        folder=folder,
        tokens=join("tokens.npy", first.tokens),
        segment_ids=join("segment_ids.npy", first.segment_ids),
        loss_mask=(
            None if first.loss_mask is None else join(LOSS_MASK, first.loss_mask)
        ),
        num_tokens=tokens,
        num_documents=documents,
        fingerprint=common,
        cut=dict(cut),
    )


def _without_arrays(folder: pathlib.Path) -> PackedRows:
    """Opens a folder of rows, checks its files and closes them again."""
    rows = open_rows(folder)
    nothing = np.empty((len(rows), 0), np.uint16)
    return dataclasses.replace(
        rows, tokens=nothing, segment_ids=nothing, loss_mask=None
    )


def _without_shard(rows: PackedRows) -> dict[str, Any]:
    return {key: rows.fingerprint[key] for key in rows.fingerprint if key != "shard"}


def _open_array(
    path: pathlib.Path, shape: tuple[int, int], dtypes: tuple[type, ...]
) -> np.ndarray | ShardedArray:
    with KIND.reading(path):
        if isinstance(path, BucketPath):
            # Its size alone is looked at, and it is copied when a row of it is used.
            size = path.stat().st_size - _NPY_HEADER
            for dtype in map(np.dtype, dtypes):
                if size == math.prod(shape) * dtype.itemsize:
                    return ShardedArray([path], [shape[0]], shape[1], dtype)
            raise ValueError(f"its size does not fit {HEADER}, which says {shape}")
        array = array_files.open_npy(path)
        if array.shape != shape or array.dtype not in dtypes:
            raise ValueError(
                f"it is {array.shape} {array.dtype}, and {HEADER} says {shape}"
            )
    return array


class RowIterator:
    """Endless batches of rows, in an order that can be resumed at any batch.

    Epoch e visits every row once, in an order that depends on (seed, e); for very many
    rows it is computed element by element (`permutation`). Rows that do not fill a
    batch at the end of an epoch begin the first batch of the next one, so no row is
    dropped and a batch may be larger than the corpus. The state is the number of rows
    returned so far.

    With several processes each one gets its own consecutive part of every batch:
    process 1 of 2 holds rows B/2 to B-1.

    From a bucket a process copies each shard of which it reads a row. So that it does
    not need all of them, several processes then divide a shuffled batch in the order of
    the folder: the batches have the same rows, and process 0 of P reads little more
    than the first P-th of the folder.
    """

    def __init__(
        self,
        rows: PackedRows,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Starts at the first batch of epoch 0.

        Args:
          rows: what to read.
          batch_size: B, rows of a batch over all processes.
          seed: seed of the order, at least 0.
          shuffle: False visits the rows in the order of the file.
          process_index: index of the part of each batch to return, from 0.
          process_count: number of parts.

        Raises:
          UserError: there are no rows, or the batch cannot be divided evenly.
        """
        if len(rows) == 0:
            raise UserError(f"{rows.folder} holds no rows.")
        if seed < 0:
            raise UserError(f"seed is {seed}: it must be 0 or more.")
        if batch_size < 1 or batch_size % process_count:
            raise UserError(
                f"batch_size is {batch_size}: it must be a positive multiple of the "
                f"number of processes ({process_count})."
            )
        if not 0 <= process_index < process_count:
            raise ValueError(f"process {process_index} of {process_count}")
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._process_index = process_index
        self._local_size = batch_size // process_count
        in_bucket = isinstance(rows.folder, BucketPath)
        self._by_place = shuffle and process_count > 1 and in_bucket
        self._given = 0
        self._epoch = -1
        self._order: Callable[[np.ndarray], np.ndarray] = np.asarray

    def __iter__(self) -> "RowIterator":
        return self

    def __next__(self) -> Batch:
        positions = self._given + np.arange(self._batch_size)
        self._given += self._batch_size
        first = self._process_index * self._local_size
        part = slice(first, first + self._local_size)
        if self._by_place:
            return self._rows.batch(np.sort(self._rows_at(positions))[part])
        return self._rows.batch(self._rows_at(positions[part]))

    @property
    def epoch(self) -> float:
        """Number of epochs so far, including the fraction of the current one."""
        return self._given / len(self._rows)

    def state(self) -> dict[str, int]:
        """Returns the state for `restore`; the same in every process."""
        return {"given": self._given, "seed": self._seed, "rows": len(self._rows)}

    def restore(self, state: dict[str, int]) -> None:
        """Continues at the position of the iterator that returned `state`.

        The batch size and the number of processes may have changed.

        Raises:
          UserError: the state belongs to other rows or another seed.
        """
        for name, current in self.state().items():
            if name not in state or (name != "given" and state[name] != current):
                raise UserError(
                    "the saved position in the data does not match "
                    f"{self._rows.folder}: "
                    f"{name} was {state.get(name)} and is {current}."
                )
        self._given = int(state["given"])

    def _rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Indices of the rows at ascending `positions` of the endless sequence."""
        epochs, positions = np.divmod(positions, len(self._rows))
        if not self._shuffle:
            return positions
        rows = []
        for epoch in np.unique(epochs):
            if epoch != self._epoch:
                self._order = _order(len(self._rows), (self._seed, int(epoch)))
                self._epoch = epoch
            rows.append(self._order(positions[epochs == epoch]))
        return np.concatenate(rows)


def _order(size: int, seed: tuple[int, int]) -> Callable[[np.ndarray], np.ndarray]:
    """A permutation of `size` rows, as a function of positions."""
    if size > _LARGEST_TABLE:
        return Permutation(size, seed)
    return np.random.default_rng(seed).permutation(size).__getitem__
