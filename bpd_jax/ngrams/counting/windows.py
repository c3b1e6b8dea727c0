"""Sorted windows of sequences, from which the n-grams of all orders are counted.

A window of N symbols begins at each position of a text. The count of an n-gram is the
number of windows that begin with it, so the sorted distinct windows and their counts
determine the n-grams of orders 1 ... N (see `counts`).

A window is a row of W words of 64 bits, where W is usually 1. Its digits in base V + 3
are symbol + 1, and 0 after the end of the sequence, so that rows sort like n-grams: a
shorter n-gram precedes its extensions.

Worked example (V = 3, so `</s>` = 3, `<s>` = 4 and the base is 6; N = 3): the sequence
`0 1` has the windows

    <s> 0 1    0 1 </s>    1 </s> -    </s> - -
    5 1 2      1 2 4       2 4 0       4 0 0       as digits
    188        52          96          144         as words
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import parallel, trie

# A stream is sorted in parts of about this number of windows, which fit into a core's
# cache, but in at most `_MOST_PARTS` parts.
_PART_WINDOWS = 1 << 16
_MOST_PARTS = 256


class TokenBatch(NamedTuple):
    """Concatenated sequences.

    Attributes:
      tokens: `[n]` int32.
      lengths: `[m]` int64, lengths of the m sequences, whose sum is n.
    """

    tokens: np.ndarray
    lengths: np.ndarray


class Counted(NamedTuple):
    """Sorted distinct windows.

    Attributes:
      rows: `[n, W]` uint64.
      counts: `[n]` int64, number of occurrences of each.
    """

    rows: np.ndarray
    counts: np.ndarray


class SortedWindows(NamedTuple):
    """The distinct windows of a text, which can be read once.

    Attributes:
      most: upper bound on their number.
      number: number of parts.
      parts: the parts in ascending order; a part may be empty.
    """

    most: int
    number: int
    parts: Iterator[Counted]


# A limit against mistaken orders: memory and time grow with the order.
MAX_ORDER = 64


@dataclasses.dataclass(frozen=True)
class Packing:
    """The packing of a window of `order` symbols into a row of words."""

    order: int
    vocab_size: int

    @property
    def base(self) -> int:
        """The number of digits: one for every symbol, and 0 past the end."""
        return trie.symbol_width(self.vocab_size) + 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """`[W]` int64: digits in each word; all words but the last are full."""
        most = 1
        while self.base ** (most + 1) <= 2**64:
            most += 1
        lengths = [most] * (self.order // most)
        rest = self.order % most
        return np.array([*lengths, rest] if rest else lengths, np.int64)

    @property
    def words(self) -> int:
        """W."""
        return self.lengths.size

    @functools.cached_property
    def bases(self) -> np.ndarray:
        """`[W + 1]` uint64: the base, and the weight of each word's first digit."""
        weights = [self.base ** (int(length) - 1) for length in self.lengths]
        return np.array([self.base, *weights], np.uint64)


def join(sequences: Iterable[Sequence[int] | np.ndarray]) -> TokenBatch:
    """Concatenates one or more sequences."""
    arrays = [np.asarray(sequence, np.int32) for sequence in sequences]
    lengths = np.array([array.size for array in arrays], np.int64)
    return TokenBatch(np.concatenate(arrays), lengths)


def add_boundaries(
    batch: TokenBatch,
    *,
    vocab_size: int,
    end_of_text: int | None,
    first: int = 1,
    name: str | None = None,
) -> np.ndarray:
    """Concatenates sequences into one stream `[T]` int32, each from `<s>` to `</s>`.

    A token `end_of_text` ends a sequence. At the end of a sequence, where most files
    have it, it is the `</s>` of the sequence.

    Worked example (V = 3, so `</s>` = 3 and `<s>` = 4; end_of_text = 2): the sequence
    `0 1 2 1 2` becomes the stream `4 0 1 3 4 1 3`.

    Args:
      vocab_size: V.
      end_of_text: the token that separates documents, or None.
      first: number of the first sequence, for error messages.
      name: name of the source in error messages, or None.
    """
    if end_of_text is not None and not 0 <= end_of_text < vocab_size:
        raise UserError(
            f"end_of_text is {end_of_text}, which is outside the vocabulary "
            f"0 ... {vocab_size - 1}."
        )
    tokens, lengths = batch
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0]
        number = first + np.searchsorted(np.cumsum(lengths), wrong, "right")
        raise UserError(
            f"{f'{name}: ' if name else ''}sequence {number} holds the token "
            f"{tokens[wrong]}, which is outside the vocabulary 0 ... {vocab_size - 1}."
        )
    if end_of_text is not None:
        tokens, lengths = _split_at(batch, end_of_text)
    lengths = lengths + 2
    ends = np.cumsum(lengths) - 1
    starts = ends - lengths + 1
    stream = np.empty(int(lengths.sum()), np.int32)
    is_token = np.ones(stream.size, bool)
    is_token[starts] = is_token[ends] = False
    stream[is_token] = tokens
    stream[starts] = trie.bos_symbol(vocab_size)
    stream[ends] = trie.eos_symbol(vocab_size)
    return stream


def _split_at(batch: TokenBatch, end_of_text: int) -> TokenBatch:
    """Splits sequences at every `end_of_text`, which is dropped.

    Empty documents are dropped too, but a sequence without tokens remains one empty
    document.
    """
    tokens, lengths = batch
    inside = tokens != end_of_text
    if inside.all():
        return batch
    sequence = np.repeat(np.arange(lengths.size), lengths)
    # A number that increases with every sequence and every end of text.
    piece = (sequence + np.cumsum(~inside))[inside]
    begins = np.flatnonzero(np.diff(piece, prepend=-1))
    sizes = np.diff(begins, append=piece.size)
    sequences = sequence[inside][begins]
    empty = np.setdiff1d(np.arange(lengths.size), sequences)
    sizes = np.insert(sizes, np.searchsorted(sequences, empty), 0)
    return TokenBatch(tokens[inside], sizes)


def sorted_parts(
    stream: np.ndarray, packing: Packing, part_of: np.ndarray | None = None
) -> SortedWindows:
    """Sorts the windows of a stream, part by part, on all cores.

    Args:
      stream: `[T]` int32, complete sequences; see `add_boundaries`.
      part_of: `[V + 2]`, part of the windows that begin with each symbol,
        non-decreasing; by default the parts are of about equal size.
    """
    from bpd_jax.ngrams.counting import count_kernels

    occurrences = np.bincount(stream, minlength=packing.base - 1)
    if part_of is None:
        most = min(max(stream.size // _PART_WINDOWS, 1), _MOST_PARTS)
        part_of = balanced_parts(occurrences, most)
    parts = int(part_of[-1]) + 1
    ends = np.cumsum(np.bincount(part_of, occurrences, parts).astype(np.int64))
    rows = np.empty((stream.size, packing.words), np.uint64)
    places = np.concatenate([[0], ends[:-1]])
    count_kernels.fill_windows(
        stream,
        packing.bases,
        trie.eos_symbol(packing.vocab_size),
        part_of,
        places.copy(),
        rows,
    )
    bounds = zip(places.tolist(), ends.tolist(), strict=True)

    def count(bound: tuple[int, int]) -> Counted:
        part = rows[slice(*bound)]
        if packing.words == 1:
            part[:, 0].sort()
        else:
            count_kernels.radix_sort(part)
        counts = np.empty(len(part), np.int64)
        size = count_kernels.count_equal(part, counts)
        return Counted(part[:size], counts[:size])

    counted = parallel.in_order(count, bounds, parallel.cores())
    return SortedWindows(stream.size, parts, counted)


def balanced_parts(occurrences: np.ndarray, parts: int) -> np.ndarray:
    """Returns the part of each symbol, `[symbols]` int64, non-decreasing.

    Args:
      occurrences: `[symbols]`, number of occurrences of each symbol.
      parts: number of parts, some of which may be empty.
    """
    before = np.cumsum(occurrences) - occurrences
    total = max(int(occurrences.sum()), 1)
    return np.minimum(before * parts // total, parts - 1)


def merged(lists: Sequence[Counted]) -> Counted:
    """Merges sorted lists of distinct windows, adding the counts of equal ones."""
    from bpd_jax.ngrams.counting import count_kernels

    lists = list(lists)
    while len(lists) > 1:
        pairs = [lists[index : index + 2] for index in range(0, len(lists), 2)]
        lists = []
        for pair in pairs:
            if len(pair) == 1:
                lists.append(pair[0])
                continue
            (rows_a, counts_a), (rows_b, counts_b) = pair
            rows = np.empty((len(rows_a) + len(rows_b), rows_a.shape[1]), np.uint64)
            counts = np.empty(len(rows), np.int64)
            size = count_kernels.merge(rows_a, counts_a, rows_b, counts_b, rows, counts)
            lists.append(Counted(rows[:size], counts[:size]))
    return lists[0]
