"""Counts as text: one n-gram, a tab and its count per line.

    <s> 12    3
    12 7 </s>    2

It is what OpenGrm's `ngramprint` and SRILM's `ngram-count -write` write, plain or gzip,
in any order of the lines. A symbol is a token's id in decimal unless a table of strings
is given; `<s>` and `</s>` are written so.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from bpd_jax.buckets import as_path
from bpd_jax.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.counting import levels
from bpd_jax.ngrams.counting.counts import NGramCounts
from bpd_jax.ngrams.counting.token_files import parse_id
from bpd_jax.ngrams.text_blocks import line_blocks

# Stand-ins until V is known.
_EOS, _BOS = -1, -2


class _Entries(NamedTuple):
    """The lines of a file, or those of one order.

    Attributes:
      symbols: int32, those of all n-grams one after the other, or `[n, order]`.
      sizes: `[n]` int64, the order of each n-gram.
      counts: `[n]` int64.
      lines: `[n]` int64, the number of each one's line.
    """

    symbols: np.ndarray
    sizes: np.ndarray
    counts: np.ndarray
    lines: np.ndarray


def read_counts(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    symbols: Sequence[str] | None = None,
    end_of_text: int | None = None,
) -> NGramCounts:
    """Reads counts of all orders; whatever is wrong is told with its line.

    The counts of a text have sums: what follows an n-gram that does not end in `</s>`
    adds up to its own count. Where it is less, n-grams were left out by minimum counts,
    and their mass goes to the back-off as with `counts.with_min_counts`. What precedes
    an n-gram adds up to its own count or less.

    Args:
      path: the file; gzip is recognised by its content.
      vocab_size: V; by default the length of `symbols`, or else the highest id plus 1.
      symbols: the strings of the tokens 0 ... V-1; by default tokens are decimal ids.
      end_of_text: the token that stands for `</s>` and `<s>`, or None.

    Raises:
      UserError: the file is missing or damaged, or its counts cannot be those of a
        text: an n-gram is there twice, is counted more often than its first or last
        symbols alone, or they are missing; or V is too large.
    """
    path = as_path(path)
    ids = None
    if symbols is not None:
        vocab_size = len(symbols)
        ids = {name: token for token, name in enumerate(symbols)}
    entries = _read(path, ids)
    highest = int(entries.symbols.max(initial=-1))
    if vocab_size is None:
        vocab_size = 1 + max(highest, -1 if end_of_text is None else end_of_text)
    trie.check_vocab_size(vocab_size, path)
    ends = np.cumsum(entries.sizes)
    if highest >= vocab_size:
        place = np.flatnonzero(entries.symbols >= vocab_size)[0]
        line = entries.lines[np.searchsorted(ends, place, "right")]
        _fail(path, line, f"{entries.symbols[place]} is not a token of the vocabulary")
    flat = np.where(entries.symbols == _EOS, vocab_size, entries.symbols)
    flat = np.where(flat == _BOS, vocab_size + 1, flat)

    reader = _Reader(path, vocab_size)
    for order in range(1, int(entries.sizes.max()) + 1):
        chosen = entries.sizes == order
        begins = (ends - entries.sizes)[chosen]
        reader.add_order(
            _Entries(
                flat[begins[:, None] + np.arange(order)],
                entries.sizes[chosen],
                entries.counts[chosen],
                entries.lines[chosen],
            )
        )
    return reader.finish(end_of_text)


def _fail(path: pathlib.Path, line: int, what: str) -> NoReturn:
    raise UserError(f"{path}, line {line}: {what}.")


class _Reader:
    """Sorts and checks one order after the other."""

    def __init__(self, path: pathlib.Path, vocab_size: int) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._width = trie.symbol_width(vocab_size)
        self._keys: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._lines: list[np.ndarray] = []

    def add_order(self, entries: _Entries) -> None:
        """Takes the n-grams of the next order, symbols `[n, order]`."""
        rows, _, counts, lines = entries
        order = len(self._keys) + 1
        if not len(rows):
            raise UserError(
                f"{self._path} has n-grams of more than {order} symbols, but no "
                f"{order}-grams."
            )
        inner = (rows[:, :-1] == trie.eos_symbol(self._vocab_size)).any(axis=1)
        inner |= (rows[:, 1:] == trie.bos_symbol(self._vocab_size)).any(axis=1)
        self._refuse(inner, "<s> is only first and </s> only last", lines)
        parents = np.zeros(len(rows), np.int64)
        for affix, name in ((rows[:, :-1], "first"), (rows[:, 1:], "last")):
            if order == 1:
                break
            found = np.zeros(len(rows), np.int64)
            for keys, column in zip(self._keys, affix.T, strict=True):
                found = trie.find(keys, found, column, self._width)
            part = f"its {name} {order - 1} symbols alone"
            self._refuse(found < 0, f"{part} have no count", lines)
            more = counts > self._counts[-1][found]
            self._refuse(more, f"it is counted more often than {part}", lines)
            if name == "first":
                parents = found
        keys = parents * self._width + rows[:, -1]
        by_key = np.argsort(keys, kind="stable")
        keys = keys[by_key]
        twice = np.concatenate([[False], keys[1:] == keys[:-1]])
        self._refuse(twice, f"this {order}-gram is there twice", lines[by_key])
        self._keys.append(keys)
        self._counts.append(counts[by_key])
        self._lines.append(lines[by_key])

    def _refuse(self, wrong: np.ndarray, what: str, lines: np.ndarray) -> None:
        places = np.flatnonzero(wrong)
        if places.size:
            _fail(self._path, lines[places[0]], what)

    def finish(self, end_of_text: int | None) -> NGramCounts:
        """Checks the sums and returns the counts."""
        followed = list(levels.sum_followed(self._keys, self._counts, self._width))
        links = trie.suffix_links(self._keys, self._width)
        for order in range(1, len(self._keys)):
            keys, counts = self._keys[order - 1], self._counts[order - 1]
            sums = np.zeros(keys.size, np.int64)
            np.add.at(sums, self._keys[order] // self._width, self._counts[order])
            self._refuse(
                sums > counts,
                "what begins with this n-gram adds up to more than its own count",
                self._lines[order - 1],
            )
            preceded = np.zeros(keys.size, np.int64)
            np.add.at(preceded, links[order], self._counts[order])
            self._refuse(
                preceded > counts,
                "what ends with this n-gram adds up to more than its own count",
                self._lines[order - 1],
            )
            ends = keys % self._width == trie.eos_symbol(self._vocab_size)
            dropped = (sums < counts) & ~ends
            followed[order - 1][dropped] = levels.as_stored(counts[dropped])
        return NGramCounts(
            self._vocab_size,
            tuple(self._keys),
            tuple(self._counts),
            tuple(followed),
            end_of_text=end_of_text,
        )


def _read(path: pathlib.Path, ids: Mapping[str, int] | None) -> _Entries:
    blocks = list(_read_blocks(path, ids))
    if not sum(block.sizes.size for block in blocks):
        raise UserError(f"{path} holds no counts: the file is empty.")
    return _Entries(*(np.concatenate(column) for column in zip(*blocks, strict=True)))


def _read_blocks(
    path: pathlib.Path, ids: Mapping[str, int] | None
) -> Iterator[_Entries]:
    from bpd_jax.ngrams.counting import count_kernels

    before = 0  # lines
    for data in line_blocks(path, "read counts", distinct=True):
        lines = data.count(b"\n") + 1
        if ids is None:
            text = np.frombuffer(data, np.uint8)
            symbols = np.empty(text.size // 2 + 1, np.int32)
            sizes, counts, numbers = np.empty((3, lines), np.int64)
            used, found, fault = count_kernels.parse_counts(
                text, symbols, sizes, counts, numbers
            )
            if not fault:
                yield _Entries(
                    symbols[:used],
                    sizes[:found],
                    counts[:found],
                    before + numbers[:found],
                )
                before += lines - 1
                continue
        yield _parse(path, data, before, ids)
        before += lines - 1


def _parse(
    path: pathlib.Path, data: bytes, before: int, ids: Mapping[str, int] | None
) -> _Entries:
    """Parses lines with named symbols, and those with a fault in them."""
    symbols: list[int] = []
    sizes, counts, numbers = [], [], []
    for number, line in enumerate(data.split(b"\n"), start=before + 1):
        if not line.strip():
            continue
        try:
            *names, last = line.decode("utf-8").split()
        except UnicodeDecodeError:
            _fail(path, number, "this is not UTF-8 text")
        if not names:
            what = f"expected an n-gram, a tab and its count: {last!r}"
            _fail(path, number, what)
        try:
            count = float(last)
        except ValueError:
            _fail(path, number, f"the count {last!r} is no number")
        if not (1 <= count < 2**63 and count == int(count)):
            what = f"the count {last} is no whole number of 1 or more"
            _fail(path, number, what)
        symbols += [_symbol(path, number, name, ids) for name in names]
        sizes.append(len(names))
        counts.append(_whole(last, count))
        numbers.append(number)
    return _Entries(
        np.array(symbols, np.int32),
        np.array(sizes, np.int64),
        np.array(counts, np.int64),
        np.array(numbers, np.int64),
    )


def _whole(text: str, value: float) -> int:
    """Returns a count to the last digit, where a float does not hold it."""
    digits = text.lstrip("0")
    # Other scripts have digits too, and a zero that is not left out.
    return int(digits) if digits.isascii() and digits.isdecimal() else int(value)


def _symbol(
    path: pathlib.Path, number: int, name: str, ids: Mapping[str, int] | None
) -> int:
    if name == "</s>":
        return _EOS
    if name == "<s>":
        return _BOS
    token = parse_id(name.encode()) if ids is None else ids.get(name, -1)
    if token < 0:
        _fail(path, number, f"{name!r} is not a token of the vocabulary")
    return token
