"""Counts of n-grams of every order, from sorted distinct windows; minimum counts.

All ways of counting end in `assemble`: windows sorted in memory, sorted runs on disk
and the output of a Beam pipeline. Therefore their counts are bitwise equal.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import IO, ClassVar

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import storage, trie
from bpd_jax.ngrams.counting import windows
from bpd_jax.ngrams.counting.windows import Packing, SortedWindows
from bpd_jax.ngrams.storage import FLOATS, INTEGERS, NGramArrays
from bpd_jax.storage.paths import as_path

_STEP = 1 << 18  # Windows that are processed at once.
_TABLE_SIZE = 1 << 16  # Counts below this are looked up.


@dataclasses.dataclass(frozen=True, eq=False)
class NGramCounts(NGramArrays):
    """Counts of the n-grams of all orders, in the layout of `bpd_jax.ngrams.trie`.

    Attributes:
      vocab_size: V; `</s>` is symbol V and `<s>` is V+1.
      keys: per order, `[n]` int64.
      counts: per order, `[n]` int64.
      followed: per order except the highest, `[n]` float64: number of times that any
        symbol followed the n-gram, rounded by `round_counts`. It includes
        n-grams that minimum counts dropped.
      end_of_text: the token that separates documents, or None; see `NGramModel`.
      seen: per order, number of different n-grams before minimum counts; by default
        their present number.
    """

    vocab_size: int
    keys: trie.Keys
    counts: tuple[np.ndarray, ...]
    followed: tuple[np.ndarray, ...]
    end_of_text: int | None = None
    seen: tuple[int, ...] = ()

    kind: ClassVar = storage.kind("n-gram counts", "ngram_counts.json", "count again")
    values: ClassVar = {
        "counts": dataclasses.replace(INTEGERS, low=1),
        "followed": dataclasses.replace(FLOATS, low=0),
    }
    settings: ClassVar = (*NGramArrays.settings, "seen")

    def __post_init__(self) -> None:
        object.__setattr__(self, "seen", tuple(self.seen or self.sizes))

    @property
    def sequences(self) -> int:
        """Number of counted documents or lines."""
        return int(self.counts[0][self.keys[0] == self.eos].sum())

    @property
    def tokens(self) -> int:
        """Number of counted tokens, without the boundaries of sequences."""
        return int(self.counts[0][self.keys[0] < self.eos].sum())


def count_ngrams(
    sequences: Iterable[Sequence[int] | np.ndarray],
    *,
    order: int,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
) -> NGramCounts:
    """Counts the n-grams of orders 1 ... `order` of sequences in memory.

    N-grams do not cross sequences; `<s>` is only the first symbol of an n-gram and
    `</s>` only the last, as in ARPA files. The result has no orders longer than the
    longest sequence. `bounded_memory.count` counts text that does not fit into memory.

    Args:
      sequences: token ids, one array per document, without begin and end tokens.
      order: the highest order N.
      vocab_size: V; by default the highest id plus 1.
      end_of_text: the token that separates documents, or None; see
        `windows.add_boundaries`.
    """
    sequences = list(sequences)
    if not sequences:
        raise UserError("there is no text to count: the input is empty.")
    batch = windows.join(sequences)
    if vocab_size is None:
        highest = -1 if end_of_text is None else end_of_text
        vocab_size = 1 + int(batch.tokens.max(initial=highest))
    trie.check_vocab_size(vocab_size)
    stream = windows.add_boundaries(
        batch, vocab_size=vocab_size, end_of_text=end_of_text
    )
    packing = windows.Packing(order, vocab_size)
    return assemble(windows.sorted_parts(stream, packing), packing, end_of_text)


def assemble(
    sorted_windows: SortedWindows,
    packing: Packing,
    end_of_text: int | None = None,
    min_counts: Sequence[int] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> NGramCounts:
    """Computes the n-grams of all orders from sorted distinct windows, in one pass.

    If a minimum count is smaller than that of a lower order, the smaller one is applied
    first, so that the result temporarily needs more memory.

    Args:
      sorted_windows: windows of the complete text.
      min_counts: see `with_min_counts`; None for 1 everywhere.
      folder: folder of the arrays, which are then memory-mapped; None for memory. They
        take 24 bytes per n-gram, and 16 for the highest order. Everything else takes
        some tens of megabytes.
    """
    from bpd_jax.ngrams.counting import count_kernels

    order = packing.order
    wanted = list(min_counts or [1] * order)[:order]
    # An n-gram below this minimum is too rare in its own order, and so is every longer
    # n-gram that contains it. These numbers do not decrease, so that the prefixes and
    # suffixes of a kept n-gram, which are at least as frequent, are kept too.
    least = [min(wanted[level:]) for level in range(order)]
    state = np.zeros((4, order), np.int64)
    following = np.zeros(order)
    previous = np.zeros(packing.words, np.uint64)
    found = np.empty((order, _STEP + 1), np.int64)
    numbers = np.empty_like(found)
    followed = np.empty(found.shape)

    def columns(name: str, dtype: type, number: int) -> list[_Column]:
        paths = [
            as_path(folder) / f"{name}_{n + 1}.bin" if folder else None
            for n in range(number)
        ]
        return [_Column(dtype, sorted_windows.most, path) for path in paths]

    all_columns = (
        columns("keys", np.int64, order),
        columns("counts", np.int64, order),
        columns("followed", np.float64, order - 1),
    )

    def split(rows: np.ndarray, counts: np.ndarray) -> None:
        written = count_kernels.split_orders(
            rows,
            counts,
            packing.lengths,
            packing.bases,
            np.array(least, np.int64),
            rounded_counts_table(),
            state,
            following,
            previous,
            found,
            numbers,
            followed,
        )
        results = (found, numbers, followed)
        for of_order, result in zip(all_columns, results, strict=True):
            for level, column in enumerate(of_order):
                part = result[level, : written[level]]
                column.append(round_counts(part) if result is followed else part)

    try:
        for part in progress.bar(
            sorted_windows.parts,
            label="count",
            total=sorted_windows.number,
            unit=" parts",
        ):
            for begin in range(0, len(part.rows), _STEP):
                split(*(array[begin : begin + _STEP] for array in part))
        split(np.empty((0, packing.words), np.uint64), np.empty(0, np.int64))
        # The highest orders may be empty.
        present = sum(1 for column in all_columns[0] if column.size)
        keys, counts, sums = (
            tuple(column.array() for column in of_order[: present - index // 2])
            for index, of_order in enumerate(all_columns)
        )
    finally:
        for of_order in all_columns:
            for column in of_order:
                column.close()
    if not present:
        raise UserError("there is no text to count: the input is empty.")
    seen = tuple(state[2][state[2] > 0].tolist())
    made = NGramCounts(packing.vocab_size, keys, counts, sums, end_of_text, seen)
    return made if least == wanted else with_min_counts(made, wanted)


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


def with_min_counts(counts: NGramCounts, min_counts: Sequence[int]) -> NGramCounts:
    """Drops rare n-grams, like OpenGrm's count pruning.

    A rare n-gram is kept if it is the prefix or suffix of a longer one that is kept.
    The mass of the dropped n-grams of a history goes to its back-off.

    Args:
      counts: counts of orders 1 ... N.
      min_counts: lowest count to keep for each order, N numbers or more; the first
        must be 1, because unigrams are never dropped.
    """
    if len(min_counts) < len(counts.keys):
        raise UserError(
            f"min_counts has {len(min_counts)} numbers for {len(counts.keys)} orders: "
            "give one per order."
        )
    keep = [
        number >= minimum
        for number, minimum in zip(counts.counts, min_counts, strict=False)
    ]
    links = trie.suffix_links(counts.keys, counts.width)
    for order in range(len(keep) - 1, 0, -1):
        keep[order - 1][counts.keys[order][keep[order]] // counts.width] = True
        keep[order - 1][links[order][keep[order]]] = True
    keys = trie.select(counts.keys, keep, counts.width)
    orders = range(len(keys))
    return dataclasses.replace(
        counts,
        keys=keys,
        counts=tuple(counts.counts[n][keep[n]] for n in orders),
        followed=tuple(counts.followed[n][keep[n]] for n in orders[:-1]),
    )
