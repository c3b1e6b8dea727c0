"""Counts as text: an n-gram, a tab and its count per line.

    <s> 12    3
    12 7 </s>    2

This is the output format of OpenGrm's `ngramprint` and SRILM's `ngram-count -write`,
plain or gzip, with the lines in any order. Symbols are decimal token ids, and `<s>` and
`</s>`.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.counting import order_counts
from bpd_jax.ngrams.counting.counts import NGramCounts
from bpd_jax.ngrams.counting.token_files import HIGHEST_ID, parse_id
from bpd_jax.ngrams.text_blocks import line_blocks
from bpd_jax.storage.buckets import as_path

# Placeholders for </s> and <s> until V is known.
_BOUNDARIES = {b"</s>": -1, b"<s>": -2}
_HIGHEST_COUNT = 10**17 - 1  # of the compiled loop


class _Lines(NamedTuple):
    """The lines of a file or of a block.

    Attributes:
      symbols: int32, the symbols of all n-grams concatenated.
      sizes: `[n]` int64, the order of each n-gram.
      counts: `[n]` int64.
      numbers: `[n]` int64, line numbers.
    """

    symbols: np.ndarray
    sizes: np.ndarray
    counts: np.ndarray
    numbers: np.ndarray


def read_counts(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
) -> NGramCounts:
    """Reads counts of all orders; errors name the line.

    In the counts of a text, the counts of the extensions of an n-gram that does not end
    in `</s>` add up to its own count. If their sum is less, minimum counts have dropped
    extensions, whose mass goes to the back-off as in `counts.with_min_counts`. The
    counts of the n-grams that end with an n-gram add up to at most its own count.

    Args:
      path: the file; gzip is recognised by its content.
      vocab_size: V; by default the highest id plus 1.
      end_of_text: see `NGramModel`.

    Raises:
      UserError: the file is missing or damaged; or its counts are inconsistent: an
        n-gram is listed twice, or its prefix or suffix is missing or has a smaller
        count; or V is too large.
    """
    path = as_path(path)
    blocks = list(_read_blocks(path))
    if not any(block.sizes.size for block in blocks):
        raise UserError(f"{path} holds no counts: the file is empty.")
    columns = zip(*blocks, strict=True)
    symbols, sizes, counts, numbers = (np.concatenate(column) for column in columns)
    highest = int(symbols.max())
    if vocab_size is None:
        vocab_size = 1 + max(highest, -1 if end_of_text is None else end_of_text)
    trie.check_vocab_size(vocab_size, path)
    ends = np.cumsum(sizes)
    if highest >= vocab_size:
        index = np.flatnonzero(symbols >= vocab_size)[0]
        line = numbers[np.searchsorted(ends, index, "right")]
        _fail(path, line, f"{symbols[index]} is not a token of the vocabulary")
    # -1 is </s> = V, and -2 is <s> = V + 1.
    symbols = np.where(symbols < 0, vocab_size - 1 - symbols, symbols)

    reader = _CountsReader(path, vocab_size)
    for order in range(1, int(sizes.max()) + 1):
        of_order = sizes == order
        begins = (ends - sizes)[of_order]
        rows = symbols[begins[:, None] + np.arange(order)]
        reader.add_order(rows, counts[of_order], numbers[of_order])
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

    def add_order(
        self, rows: np.ndarray, counts: np.ndarray, lines: np.ndarray
    ) -> None:
        """Adds the n-grams of the next order: symbols `[n, order]`, counts, lines."""
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
        for affix, name in ((rows[:, 1:], "last"), (rows[:, :-1], "first")):
            if order == 1:
                break
            parents = np.zeros(len(rows), np.int64)
            for keys, column in zip(self._keys, affix.T, strict=True):
                parents = trie.find(keys, parents, column, self._width)
            part = f"its {name} {order - 1} symbols"
            self._refuse(parents < 0, f"{part} have no count", lines)
            exceeds = counts > self._counts[-1][parents]
            self._refuse(exceeds, f"its count is higher than that of {part}", lines)
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
        followed = list(
            order_counts.sum_followed(self._keys, self._counts, self._width)
        )
        links = trie.suffix_links(self._keys, self._width)
        for order in range(1, len(self._keys)):
            keys, counts = self._keys[order - 1], self._counts[order - 1]
            lines, longer = self._lines[order - 1], self._counts[order]
            sums, preceded = np.zeros((2, keys.size), np.int64)
            np.add.at(sums, self._keys[order] // self._width, longer)
            np.add.at(preceded, links[order], longer)
            reason = "the counts of its extensions add up to more than its own count"
            self._refuse(sums > counts, reason, lines)
            reason = (
                "the counts of longer n-grams that end with it exceed its own count"
            )
            self._refuse(preceded > counts, reason, lines)
            ends = keys % self._width == trie.eos_symbol(self._vocab_size)
            dropped = (sums < counts) & ~ends
            followed[order - 1][dropped] = order_counts.round_counts(counts[dropped])
        return NGramCounts(
            self._vocab_size,
            tuple(self._keys),
            tuple(self._counts),
            tuple(followed),
            end_of_text=end_of_text,
        )


def _read_blocks(path: pathlib.Path) -> Iterator[_Lines]:
    """Reads lines; those of unusual form, and errors, are left to `_parse`."""
    from bpd_jax.ngrams.counting import count_kernels

    before = 0  # lines
    for data in line_blocks(path, "read counts", distinct=True):
        text = np.frombuffer(data, np.uint8)
        fields = np.empty(text.size // 2 + 1, np.int64)
        lengths = np.empty(data.count(b"\n") + 1, np.int64)
        size, lines, fault = count_kernels.parse_numbers(
            text, fields, lengths, _HIGHEST_COUNT, True
        )
        # Lines that are not empty; the last field of each is its count.
        numbers = np.flatnonzero(lengths[:lines])
        sizes = lengths[numbers] - 1
        ends = np.cumsum(sizes + 1) - 1
        counts, symbols = fields[ends], np.delete(fields[:size], ends)
        positive = (sizes > 0).all() and (counts > 0).all()
        if positive and (symbols <= HIGHEST_ID).all() and not fault:
            yield _Lines(symbols.astype(np.int32), sizes, counts, before + numbers + 1)
        else:
            yield _parse(path, data, before)
        before += data.count(b"\n")


def _parse(path: pathlib.Path, data: bytes, before: int) -> _Lines:
    symbols: list[int] = []
    sizes, counts, numbers = [], [], []
    for number, line in enumerate(data.split(b"\n"), start=before + 1):
        # As in the compiled loop, only ASCII blanks separate symbols.
        if not line.split():
            continue
        *names, last = line.split()
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            _fail(path, number, "this is not UTF-8 text")
        text = repr(last.decode())
        if not names:
            _fail(path, number, f"expected an n-gram, a tab and its count: {text}")
        try:
            count = float(last)
        except ValueError:
            _fail(path, number, f"the count {text} is not a number")
        if not (1 <= count < 2**63 and count == int(count)):
            _fail(path, number, f"the count {text} is not a positive integer")
        for name in names:
            symbols.append(_BOUNDARIES.get(name) or parse_id(name))
            if symbols[-1] == -1 and name not in _BOUNDARIES:
                reason = f"{name.decode()!r} is not a token of the vocabulary"
                _fail(path, number, reason)
        digits = last.lstrip(b"0")
        sizes.append(len(names))
        # A float would round a long count.
        counts.append(int(digits) if digits.isdigit() else int(count))
        numbers.append(number)
    return _Lines(
        np.array(symbols, np.int32),
        np.array(sizes, np.int64),
        np.array(counts, np.int64),
        np.array(numbers, np.int64),
    )
