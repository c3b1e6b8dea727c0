"""Token files: packed rows on disk, and batches of them.

A folder of rows contains `tokens.npy` and `segment_ids.npy`, both `[rows, length]`, the
header `rows.json`, and the vocabulary as `tokenizer.json`. The segments of a row are
numbered 1, 2, ...; 0 marks padding at the end of the row. If some tokens are not in the
loss, `loss_mask.npy` (bool) marks those that are. A folder may instead consist of
several such folders (`row_shards`).

This module needs only numpy.
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

from bpd_jax.base.errors import UserError
from bpd_jax.data.row_shards import Permutation, ShardedArray, shard_folders
from bpd_jax.storage.folders import Artifact
from bpd_jax.storage.paths import as_path, in_bucket

HEADER, LOSS_MASK = "rows.json", "loss_mask.npy"

KIND = Artifact(
    "token files",
    HEADER,
    ("tokens.npy", "segment_ids.npy", LOSS_MASK, "tokenizer.json"),
    '"end_of_text"',
    remedy="remove the folder and prepare it again",
)
_NUMBERS = ("rows", "length", "tokens", "documents", "vocab_size", "end_of_text")
_FIELDS = dict.fromkeys(_NUMBERS, int) | {
    "split": str,
    "vocabulary": str,
    "fingerprint": dict,
}

_OPEN_THREADS = 16  # Number of shards opened at once.
_NPY_HEADER = 128  # Bytes of the header of an array with two axes.

# Up to this number of rows, the order is a table (64 MB); above, it is computed.
_MAX_TABLE_ROWS = 1 << 23


class Batch(NamedTuple):
    """Rows for one step of training; a pytree of host arrays.

    Attributes:
      tokens: `[B, T]` int32; 0 for padding (0 is also a token).
      segment_ids: `[B, T]` int32; 1, 2, ... in each row, 0 for padding.
      positions: `[B, T]` int32; counted from 0 in each segment, 0 for padding.
      loss_mask: `[B, T]` bool; true for every token in the loss: all tokens except
        padding and context.
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
    """Returns the `Batch` of rows `[B, T]`; by default all tokens are in the loss."""
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
      num_tokens: number of tokens of all rows, without padding.
      num_documents: number of documents or examples.
      split: `train` or `validation`.
      vocab_size: number of token ids, V.
      end_of_text: id of the token that ends each document; documents of text also begin
        with it.
      fingerprint: settings, text and vocabulary that determine the rows; see
        `row_preparation`.
      truncation: counts of truncated examples; see `packing.join_examples`. Empty for
        documents.
    """

    folder: pathlib.Path
    tokens: np.ndarray | ShardedArray
    segment_ids: np.ndarray | ShardedArray
    loss_mask: np.ndarray | ShardedArray | None
    length: int
    num_tokens: int
    num_documents: int
    split: str
    vocab_size: int
    end_of_text: int
    fingerprint: dict[str, Any]
    truncation: dict[str, int] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def waste(self) -> float:
        """The fraction of padding."""
        return 1 - self.num_tokens / self.tokens.size

    def batch(self, indices: np.ndarray | slice) -> Batch:
        """Returns the rows at `indices`."""
        mask = None if self.loss_mask is None else self.loss_mask[indices]
        return make_batch(self.tokens[indices], self.segment_ids[indices], mask)


def open_rows(folder: str | os.PathLike[str]) -> PackedRows:
    """Opens a folder of rows, or of shards; arrays are mapped when they are read."""
    folder = as_path(folder)
    shards = shard_folders(folder)
    paths = shards or [folder]
    with concurrent.futures.ThreadPoolExecutor(_OPEN_THREADS) as pool:
        headers = list(pool.map(_read_header, paths))
    header = headers[0]
    fingerprint = header["fingerprint"]
    truncation: collections.Counter[str] = collections.Counter()
    for path, other in zip(paths, headers, strict=True):
        if shards:  # All shards of the same rows share the rest.
            other["fingerprint"].pop("shard", None)
        for name, value in other["fingerprint"].items():
            if value != fingerprint.get(name):
                raise UserError(
                    f"{path} does not belong to {paths[0]}: {name} is {value!r} here "
                    f"and {fingerprint.get(name)!r} there."
                )
        truncation.update(other.get("cut", {}))
    counts = [other["rows"] for other in headers]
    arrays = {
        name: ShardedArray(
            [path / name for path in paths], counts, header["length"], dtype
        )
        for name, dtype in array_dtypes(header).items()
    }
    return PackedRows(
        folder=folder,
        tokens=arrays["tokens.npy"],
        segment_ids=arrays["segment_ids.npy"],
        loss_mask=arrays.get(LOSS_MASK),
        length=header["length"],
        num_tokens=sum(other["tokens"] for other in headers),
        num_documents=sum(other["documents"] for other in headers),
        split=header["split"],
        vocab_size=header["vocab_size"],
        end_of_text=header["end_of_text"],
        fingerprint=fingerprint,
        truncation=dict(truncation),
    )


def array_dtypes(header: dict[str, Any]) -> dict[str, np.dtype]:
    """The arrays of a folder, with their types."""
    token = np.uint16 if header["vocab_size"] <= 2**16 else np.int32
    dtypes = {"tokens.npy": np.dtype(token), "segment_ids.npy": np.dtype(np.uint16)}
    return dtypes | ({LOSS_MASK: np.dtype(bool)} if header.get("loss_mask") else {})


def _read_header(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the header of a folder of rows, and checks the sizes of its arrays."""
    header = KIND.read_header(folder, _FIELDS)
    with KIND.reading(folder / HEADER):
        cut = header.get("cut", {})
        if not isinstance(cut, dict) or {type(n) for n in cut.values()} - {int}:
            raise ValueError("its field cut does not map names to integers")
    shape = (header["rows"], header["length"])
    for name, dtype in array_dtypes(header).items():
        with KIND.reading(folder / name):
            size = (folder / name).stat().st_size - _NPY_HEADER
            if min(shape) < 0 or size != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"its size does not match {HEADER}: {shape} {dtype}")
    return header


class RowIterator:
    """An endless iterator over batches of rows, which can be resumed exactly.

    Epoch e visits every row once, in an order that depends on (seed, e). Rows that do
    not fill a batch at the end of an epoch begin the first batch of the next epoch, so
    that no row is dropped and a batch may be larger than the corpus.

    With several processes, each process returns a contiguous part of every batch:
    process 1 of 2 returns rows B/2 to B-1. If the rows are in a bucket, a process
    copies each shard of which it reads a row. There the rows of a batch are sorted by
    their position in the folder before they are divided among processes: the batches
    contain the same rows, and process 0 of P reads little more than the first P-th of
    the folder.
    """

    def __init__(
        self,
        rows: PackedRows,
        batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Starts at the first batch of epoch 0.

        B rows of a batch are those of all processes, whose number divides it.
        """
        if len(rows) == 0:
            raise UserError(f"{rows.folder} holds no rows.")
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._process_index = process_index
        self._local_size = batch_size // process_count
        self._sorts_batches = process_count > 1 and in_bucket(rows.folder)
        self._num_returned = 0
        self._epoch = -1
        self._order: Callable[[np.ndarray], np.ndarray] = np.asarray

    def __iter__(self) -> "RowIterator":
        return self

    def __next__(self) -> Batch:
        positions = self._num_returned + np.arange(self._batch_size)
        self._num_returned += self._batch_size
        first = self._process_index * self._local_size
        part = slice(first, first + self._local_size)
        if self._sorts_batches:
            return self._rows.batch(np.sort(self._rows_at(positions))[part])
        return self._rows.batch(self._rows_at(positions[part]))

    def state(self) -> dict[str, int]:
        """Returns the state for `restore`; the same in every process."""
        # The name "given" is part of checkpoints.
        size = len(self._rows)
        return {"given": self._num_returned, "seed": self._seed, "rows": size}

    def restore(self, state: dict[str, int]) -> None:
        """Resumes at the position of the iterator that returned `state`.

        The batch size and the number of processes may have changed.
        """
        for name, current in self.state().items():
            if name not in state or (name != "given" and state[name] != current):
                raise UserError(
                    f"the saved position in the data does not match {self._rows.folder}"
                    f": {name} was {state.get(name)} and is {current}."
                )
        self._num_returned = int(state["given"])

    def _rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Indices of the rows at ascending positions of the endless sequence."""
        epochs, positions = np.divmod(positions, len(self._rows))
        rows = []
        for epoch in np.unique(epochs):
            if epoch != self._epoch:
                size, seed = len(self._rows), (self._seed, int(epoch))
                if size > _MAX_TABLE_ROWS:
                    self._order = Permutation(size, seed)
                else:
                    table = np.random.default_rng(seed).permutation(size)
                    self._order = table.__getitem__
                self._epoch = epoch
            rows.append(self._order(positions[epochs == epoch]))
        return np.concatenate(rows)
