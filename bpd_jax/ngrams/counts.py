"""Counts of n-grams of every order, and minimum counts."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from bpd_jax import progress
from bpd_jax.errors import UserError
from bpd_jax.ngrams import trie


@dataclasses.dataclass(frozen=True, eq=False)
class NGramCounts:
    """How often every n-gram was seen; `bpd_jax.ngrams.trie` has the layout.

    Attributes:
      vocab_size: V; `</s>` is symbol V and `<s>` is V+1.
      keys: per order, `[n]` int64.
      counts: per order, `[n]` int64.
      followed: per order but the highest, `[n]` float64: how often anything followed
        the n-gram, `as_stored`. It includes what minimum counts dropped.
      end_of_text: the token that stands for `</s>` and `<s>`, or None.
    """

    vocab_size: int
    keys: trie.Keys
    counts: tuple[np.ndarray, ...]
    followed: tuple[np.ndarray, ...]
    end_of_text: int | None = None

    @property
    def width(self) -> int:
        """The number of symbols, V + 2."""
        return trie.symbol_width(self.vocab_size)

    @property
    def events(self) -> int:
        """Tokens counted, one `</s>` per sequence included."""
        is_event = self.keys[0] != trie.bos_symbol(self.vocab_size)
        return int(self.counts[0][is_event].sum())

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of different n-grams per order, `<s>` among the unigrams."""
        return tuple(keys.size for keys in self.keys)


def as_stored(counts: np.ndarray) -> np.ndarray:
    """Returns counts as OpenGrm's automata hold them, `[n]` float64.

    They hold the logarithm as a float32, off by up to 5e-7. A history that leaves its
    back-off a thousandth of its mass passes that on a thousandfold, so that agreement
    with OpenGrm beyond 1e-4 takes the same rounding.
    """
    with np.errstate(divide="ignore"):
        return np.exp(np.log(counts).astype(np.float32).astype(np.float64))


def boundary_stream(
    sequences: Iterable[Sequence[int] | np.ndarray],
    *,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Joins sequences into one stream, each between `<s>` and `</s>`.

    A token `end_of_text` inside a sequence ends it there; one at its end, where most
    files have it, is the `</s>` that the sequence gets anyway.

    Worked example (V = 3, so `</s>` = 3 and `<s>` = 4; end_of_text = 2): the sequence
    `0 1 2 1 2` becomes the stream `4 0 1 3 4 1 3` at positions `0 1 2 3 0 1 2`.

    Args:
      sequences: token ids in 0 ... V-1, one array per document.
      vocab_size: V; by default the highest id plus 1.
      end_of_text: the token that bounds documents, or None.

    Returns:
      The stream `[T]` int32, each symbol's position in its sequence `[T]` int32
      (0 at `<s>`), and V.

    Raises:
      UserError: there is no sequence, or a token outside the vocabulary.
    """
    pieces: list[np.ndarray] = []
    highest = -1 if end_of_text is None else end_of_text
    for number, sequence in enumerate(sequences, start=1):
        tokens = np.asarray(sequence, np.int32)
        if tokens.size:
            low, top = int(tokens.min()), int(tokens.max())
            if low < 0 or (vocab_size is not None and top >= vocab_size):
                wrong = low if low < 0 else top
                limit = "" if vocab_size is None else f" ... {vocab_size - 1}"
                raise UserError(
                    f"sequence {number} holds the token {wrong}, which is outside "
                    f"the vocabulary 0{limit}."
                )
            highest = max(highest, top)
        pieces.extend(_split_at(tokens, end_of_text))
    if not pieces:
        raise UserError("there is no text to count: the input is empty.")
    if vocab_size is None:
        vocab_size = highest + 1
    elif end_of_text is not None and not 0 <= end_of_text < vocab_size:
        raise UserError(
            f"end_of_text is {end_of_text}, which is outside the vocabulary "
            f"0 ... {vocab_size - 1}."
        )

    lengths = np.array([piece.size + 2 for piece in pieces], np.int64)
    starts = np.cumsum(lengths) - lengths
    stream = np.empty(int(lengths.sum()), np.int32)
    is_token = np.ones(stream.size, bool)
    is_token[starts] = is_token[starts + lengths - 1] = False
    stream[is_token] = np.concatenate(pieces)
    stream[starts] = trie.bos_symbol(vocab_size)
    stream[starts + lengths - 1] = trie.eos_symbol(vocab_size)
    positions = np.arange(stream.size) - np.repeat(starts, lengths)
    return stream, positions.astype(np.int32), vocab_size


def _split_at(tokens: np.ndarray, end_of_text: int | None) -> list[np.ndarray]:
    if end_of_text is None or not tokens.size:
        return [tokens]
    ends = np.flatnonzero(tokens == end_of_text)
    pieces = np.split(tokens, ends)
    pieces = [pieces[0], *(piece[1:] for piece in pieces[1:])]
    # A document that is nothing but its end-of-text token is an empty document.
    return [piece for piece in pieces if piece.size] or pieces[:1]


def count_ngrams(
    sequences: Iterable[Sequence[int] | np.ndarray],
    *,
    order: int,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
) -> NGramCounts:
    """Counts the n-grams of orders 1 ... `order`.

    No n-gram crosses the end of a sequence; `<s>` is only a first symbol and `</s>`
    only a last one, as in ARPA files. Orders longer than the longest sequence are
    left out of the result.

    Args:
      sequences: token ids, one array per document, without begin and end tokens.
      order: the highest order N.
      vocab_size: V; by default the highest id plus 1.
      end_of_text: the token that stands for the ends of a document, or None; see
        `boundary_stream`.

    Raises:
      UserError: `order` is below 1, the input is empty, or a token is outside the
        vocabulary.
    """
    if order < 1:
        raise UserError(f"order is {order}: it must be 1 or more.")
    stream, positions, vocab_size = boundary_stream(
        sequences, vocab_size=vocab_size, end_of_text=end_of_text
    )
    width = trie.symbol_width(vocab_size)
    keys: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    # Index, in the order at hand, of the n-gram that ends at each place. The empty
    # history has index 0.
    index = np.zeros(stream.size, np.int64)
    for size in progress.bar(range(1, order + 1), label="count", unit=" orders"):
        places = np.flatnonzero(positions >= size - 1)
        if not places.size:
            break
        parents = index[places - 1] if size > 1 else index
        found, inverse, number = np.unique(
            parents * width + stream[places], return_inverse=True, return_counts=True
        )
        keys.append(found)
        counts.append(number)
        index[places] = inverse
    followed = (
        as_stored(np.bincount(keys[n] // width, as_stored(counts[n]), keys[n - 1].size))
        for n in range(1, len(keys))
    )
    return NGramCounts(
        vocab_size, tuple(keys), tuple(counts), tuple(followed), end_of_text
    )


def with_min_counts(counts: NGramCounts, min_counts: Sequence[int]) -> NGramCounts:
    """Drops the n-grams seen too rarely, as OpenGrm's count pruning does.

    A rare n-gram stays where a longer one that is kept needs it as its prefix or
    suffix. The mass of what was dropped after a history goes to its back-off.

    Args:
      counts: of orders 1 ... N.
      min_counts: one number per order asked for (N or more of them); the first must
        be 1, because unigrams are never dropped.

    Raises:
      UserError: `min_counts` does not fit.
    """
    if len(min_counts) < len(counts.keys):
        raise UserError(
            f"min_counts has {len(min_counts)} numbers for {len(counts.keys)} orders: "
            "give one per order."
        )
    if min(min_counts) < 1 or min_counts[0] != 1:
        raise UserError(
            f"min_counts is {','.join(map(str, min_counts))}: every number must be 1 "
            "or more, and the first 1, because unigrams are never dropped."
        )
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
