"""Counts as text: an n-gram, a tab and its count per line.

    <s> 12    3
    12 7 </s>    2

This is the output format of OpenGrm's `ngramprint` and SRILM's `ngram-count -write`,
plain or gzip, with the lines in any order. Symbols are decimal token ids, or strings if
a symbol table is given, and `<s>` and `</s>`.
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

# Placeholders for </s> and <s> until V is known.
_EOS, _BOS = -1, -2


class _Entries(NamedTuple):
    """The lines of a file, or those of one order.

    Attributes:
      symbols: int32, the symbols of all n-grams concatenated, or `[n, order]`.
      sizes: `[n]` int64, the order of each n-gram.
      counts: `[n]` int64.
      lines: `[n]` int64, the line number of each n-gram.
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
    """Reads counts of all orders; errors name the line.

    In the counts of a text, the counts of the extensions of an n-gram that does not end
    in `</s>` add up to its own count. If their sum is less, minimum counts have dropped
    extensions, whose mass goes to the back-off as in `counts.with_min_counts`. The
    counts of the n-grams that end with an n-gram add up to at most its own count.

    Args:
      path: the file; gzip is recognised by its content.
      vocab_size: V; by default the length of `symbols`, or else the highest id plus 1.
      symbols: strings of the tokens 0 ... V-1; by default tokens are decimal ids.
      end_of_text: see `NGramModel`.

    Raises:
      UserError: the file is missing or damaged; or its counts are inconsistent: an
        n-gram is listed twice, or its prefix or suffix is missing or has a smaller
        count; or V is too large.
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
        index = np.flatnonzero(entries.symbols >= vocab_size)[0]
        line = entries.lines[np.searchsorted(ends, index, "right")]
        _fail(path, line, f"{entries.symbols[index]} is not a token of the vocabulary")
    flat = np.where(entries.symbols == _EOS, vocab_size, entries.symbols)
    flat = np.where(flat == _BOS, vocab_size + 1, flat)

    reader = _CountsReader(path, vocab_size)
    for order in range(1, int(entries.sizes.max()) + 1):
        of_order = entries.sizes == order
        begins = (ends - entries.sizes)[of_order]
        reader.add_order(
            _Entries(
                flat[begins[:, None] + np.arange(order)],
                entries.sizes[of_order],
                entries.counts[of_order],
                entries.lines[of_order],
            )
        )
    return reader.finish(end_of_text)


def _fail(path: pathlib.Path, line: int, reason: str) -> NoReturn:
    raise UserError(f"{path}, line {line}: {reason}.")


class _CountsReader:
    """Sorts and checks the n-grams, one order after the other."""

    def __init__(self, path: pathlib.Path, vocab_size: int) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._width = trie.symbol_width(vocab_size)
        self._keys: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._lines: list[np.ndarray] = []

    def add_order(self, entries: _Entries) -> None:
        """Adds the n-grams of the next order, with symbols `[n, order]`."""
        rows, _, counts, lines = entries
        order = len(self._keys) + 1
        if not len(rows):
            raise UserError(
                f"{self._path} has n-grams of more than {order} symbols, but no "
                f"{order}-grams."
            )
        inner = (rows[:, :-1] == trie.eos_symbol(self._vocab_size)).any(axis=1)
        inner |= (rows[:, 1:] == trie.bos_symbol(self._vocab_size)).any(axis=1)
        self._refuse(inner, "<s> must be the first and </s> the last symbol", lines)
        parents = np.zeros(len(rows), np.int64)
        for affix, name in ((rows[:, :-1], "first"), (rows[:, 1:], "last")):
            if order == 1:
                break
            indices = np.zeros(len(rows), np.int64)
            for keys, column in zip(self._keys, affix.T, strict=True):
                indices = trie.find(keys, indices, column, self._width)
            part = f"its {name} {order - 1} symbols"
            self._refuse(indices < 0, f"{part} have no count", lines)
            exceeds = counts > self._counts[-1][indices]
            self._refuse(exceeds, f"its count is higher than that of {part}", lines)
            if name == "first":
                parents = indices
        keys = parents * self._width + rows[:, -1]
        by_key = np.argsort(keys, kind="stable")
        keys = keys[by_key]
        repeated = np.concatenate([[False], keys[1:] == keys[:-1]])
        self._refuse(repeated, f"this {order}-gram is listed twice", lines[by_key])
        self._keys.append(keys)
        self._counts.append(counts[by_key])
        self._lines.append(lines[by_key])

    def _refuse(self, invalid: np.ndarray, reason: str, lines: np.ndarray) -> None:
        indices = np.flatnonzero(invalid)
        if indices.size:
            _fail(self._path, lines[indices[0]], reason)

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
                "the counts of its extensions add up to more than its own count",
                self._lines[order - 1],
            )
            preceded = np.zeros(keys.size, np.int64)
            np.add.at(preceded, links[order], self._counts[order])
            self._refuse(
                preceded > counts,
                "the counts of longer n-grams that end with it exceed its own count",
                self._lines[order - 1],
            )
            ends = keys % self._width == trie.eos_symbol(self._vocab_size)
            dropped = (sums < counts) & ~ends
            followed[order - 1][dropped] = levels.round_counts(counts[dropped])
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
            used, parsed, fault = count_kernels.parse_counts(
                text, symbols, sizes, counts, numbers
            )
            if not fault:
                yield _Entries(
                    symbols[:used],
                    sizes[:parsed],
                    counts[:parsed],
                    before + numbers[:parsed],
                )
                before += lines - 1
                continue
        yield _parse(path, data, before, ids)
        before += lines - 1


def _parse(
    path: pathlib.Path, data: bytes, before: int, ids: Mapping[str, int] | None
) -> _Entries:
    """Parses lines with named symbols, and lines in which there is an error."""
    symbols: list[int] = []
    sizes, counts, numbers = [], [], []
    for number, line in enumerate(data.split(b"\n"), start=before + 1):
        # As in the compiled loop, only ASCII blanks separate symbols.
        fields = line.split()
        if not fields:
            continue
        try:
            *names, last = (field.decode("utf-8") for field in fields)
        except UnicodeDecodeError:
            _fail(path, number, "this is not UTF-8 text")
        if not names:
            _fail(path, number, f"expected an n-gram, a tab and its count: {last!r}")
        try:
            count = float(last)
        except ValueError:
            _fail(path, number, f"the count {last!r} is not a number")
        if not (1 <= count < 2**63 and count == int(count)):
            _fail(path, number, f"the count {last} is not a positive integer")
        symbols += [_symbol(path, number, name, ids) for name in names]
        sizes.append(len(names))
        counts.append(_exact_integer(last, count))
        numbers.append(number)
    return _Entries(
        np.array(symbols, np.int32),
        np.array(sizes, np.int64),
        np.array(counts, np.int64),
        np.array(numbers, np.int64),
    )


def _exact_integer(text: str, value: float) -> int:
    """Returns a count exactly, even if a float would round it."""
    digits = text.lstrip("0")
    # `int(text)` would accept the digits of other scripts.
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
