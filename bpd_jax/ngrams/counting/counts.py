"""Counts of n-grams of every order, and minimum counts."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import storage, trie
from bpd_jax.ngrams.counting import order_counts, windows
from bpd_jax.ngrams.storage import FLOATS, INTEGERS, NGramArrays


@dataclasses.dataclass(frozen=True, eq=False)
class NGramCounts(NGramArrays):
    """Counts of the n-grams of all orders, in the layout of `bpd_jax.ngrams.trie`.

    Attributes:
      vocab_size: V; `</s>` is symbol V and `<s>` is V+1.
      keys: per order, `[n]` int64.
      counts: per order, `[n]` int64.
      followed: per order except the highest, `[n]` float64: number of times that any
        symbol followed the n-gram, rounded by `order_counts.round_counts`. It includes
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
    def events(self) -> int:
        """Number of counted tokens, with one `</s>` per sequence."""
        return int(self.counts[0].sum()) - self._unigram(self.bos)

    @property
    def sequences(self) -> int:
        """Number of counted documents or lines."""
        return self._unigram(self.eos)

    @property
    def tokens(self) -> int:
        """Number of counted tokens, without the boundaries of sequences."""
        return self.events - self.sequences

    def _unigram(self, symbol: int) -> int:
        return int(self.counts[0][self.keys[0] == symbol].sum())


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
    result = order_counts.assemble(windows.sorted_parts(stream, packing), packing)
    return from_levels(result, vocab_size, end_of_text)


def from_levels(
    result: order_counts.OrderCounts, vocab_size: int, end_of_text: int | None
) -> NGramCounts:
    """Converts the result of `order_counts.assemble`."""
    return NGramCounts(vocab_size, *result[:3], end_of_text=end_of_text, seen=result[3])


def check_min_counts(min_counts: Sequence[int] | None, orders: int) -> None:
    """Raises a `UserError` if minimum counts, if any, are invalid for N = `orders`."""
    if min_counts is None:
        return
    if len(min_counts) < orders:
        raise UserError(
            f"min_counts has {len(min_counts)} numbers for {orders} orders: give one "
            "per order."
        )
    if min(min_counts) < 1 or min_counts[0] != 1:
        raise UserError(
            f"min_counts is {','.join(map(str, min_counts))}: every number must be 1 "
            "or more, and the first 1, because unigrams are never dropped."
        )


def with_min_counts(counts: NGramCounts, min_counts: Sequence[int]) -> NGramCounts:
    """Drops rare n-grams, like OpenGrm's count pruning.

    A rare n-gram is kept if it is the prefix or suffix of a longer one that is kept.
    The mass of the dropped n-grams of a history goes to its back-off.

    Args:
      counts: counts of orders 1 ... N.
      min_counts: lowest count to keep for each order, N numbers or more; the first
        must be 1, because unigrams are never dropped.
    """
    check_min_counts(min_counts, len(counts.keys))
    keep = [
        number >= minimum
        for number, minimum in zip(counts.counts, min_counts, strict=False)
    ]
    keep = trie.closed_under_affixes(counts.keys, keep, counts.width)
    keys = trie.select(counts.keys, keep, counts.width)
    orders = range(len(keys))
    return dataclasses.replace(
        counts,
        keys=keys,
        counts=tuple(counts.counts[n][keep[n]] for n in orders),
        followed=tuple(counts.followed[n][keep[n]] for n in orders[:-1]),
    )
