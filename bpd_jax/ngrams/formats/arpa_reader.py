"""Reads ARPA files into models; see `formats.arpa`."""

import contextlib
import math
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import NEVER
from bpd_jax.ngrams.counting.token_files import line_blocks, parse_id
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.storage.paths import as_path

_LOG10 = math.log(10)

# Stand for other symbols until V is known.
_EOS, _BOS, _UNKNOWN = -1, -2, -3
_BOUNDARIES = {b"</s>": _EOS, b"<s>": _BOS}
_UNKNOWNS = {b"<unk>": _UNKNOWN, b"<UNK>": _UNKNOWN}

# Only these separate fields; a name may contain any other character.
_BLANKS = b" \t\r\n"
_IS_BLANK = np.isin(np.arange(256), list(_BLANKS))
_SEPARATOR = re.compile(rb"[ \t\r\n]+")
_SIZE = rb"ngram[ \t\r]+%d[ \t\r]*=[ \t\r]*(\d{1,18})"

_ROWS = 1 << 16  # Number of n-grams parsed at once.


# The n-grams of one order, in the order of the file: structured arrays `[n]`.
_Section = np.ndarray


def _fields(order: int) -> np.dtype:
    """The fields of an n-gram: its symbols, logarithms and the number of its line.

    The log-probability is NaN for an n-gram that the file lacks and the reader adds.
    """
    symbols = ("symbols", np.int32, (order,))
    numbers = [("log_prob", float), ("log_backoff", float), ("line", np.int64)]
    return np.dtype([symbols, *numbers])


def read_arpa(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
    symbols: Sequence[str] | None = None,
) -> NGramModel:
    """Reads a model; error messages contain the line number.

    Files of other programs are interpreted as follows.

    - A missing back-off weight is 1. A weight of `-inf` becomes `backoff.NEVER`.
    - A log-probability of `-inf` is probability 0; -99 has no special meaning. The
      log-probability of `<s>` is ignored.
    - N-grams with `<unk>` (or `<UNK>`) are dropped, unless `symbols` has this name. All
      others keep their scores: the probability of `<unk>` is lost, so that the model
      sums to less than one (see `NGramModel.validate`).
    - If the suffix of an n-gram was pruned (SRILM), it is added with the probability
      that the model backs off to, which changes no score.

    Args:
      path: an ARPA file; gzip is recognised by its content.
      vocab_size: V; by default the highest id plus 1.
      end_of_text: see `NGramModel`.
      symbols: names of the tokens 0 … V-1; by default tokens are decimal ids.
    """
    reader = _Reader(as_path(path), vocab_size, symbols)
    with contextlib.closing(reader.text):
        sections = reader.sections()
    keys, sections = reader.closed(sections)
    width = reader.width
    log_probs: list[np.ndarray] = []
    links = trie.suffix_links(keys, width)
    for order, section in enumerate(sections):
        log_probs.append(np.ascontiguousarray(section["log_prob"]))
        added = np.flatnonzero(np.isnan(log_probs[order]))
        if added.size:
            weights = sections[order - 1]["log_backoff"][keys[order][added] // width]
            lower = log_probs[order - 1][links[order][added]]
            log_probs[order][added] = weights + lower
    log_probs[0][keys[0] == trie.bos_symbol(reader.vocab_size)] = -np.inf
    return NGramModel(
        vocab_size=reader.vocab_size,
        keys=tuple(keys),
        log_probs=tuple(log_probs),
        log_backoffs=tuple(
            np.ascontiguousarray(section["log_backoff"]) for section in sections[:-1]
        ),
        end_of_text=end_of_text,
    )


class _Lines:
    """The lines of a file.

    Attributes:
      number: number of the last line that was taken, from 1.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.number = 0
        self._blocks = line_blocks(path, None)
        self._block = b""
        self._ends = np.zeros(0, np.int64)  # Of the lines of the block.
        self._taken = 0  # Lines of the block.

    def close(self) -> None:
        """Closes the file."""
        self._blocks.close()

    def take(self, most: int) -> bytes:
        """The next lines, at most this many; nothing at the end of the file."""
        while self._taken == self._ends.size:
            block = next(self._blocks, None)
            if block is None:
                return b""
            newlines = np.frombuffer(block, np.uint8) == ord("\n")
            self._block, self._ends = block, np.flatnonzero(newlines) + 1
            self._taken = 0
        begin = self._ends[self._taken - 1] if self._taken else 0
        last = min(self._taken + most, self._ends.size)
        self.number += last - self._taken
        self._taken = last
        return self._block[begin : self._ends[last - 1]]


class _Symbols(dict[bytes, int]):
    """Tokens by their fields: names, or decimal ids, which are added when met."""

    def __init__(self, names: Sequence[str] | None) -> None:
        named = {name.encode(): token for token, name in enumerate(names or ())}
        super().__init__(_UNKNOWNS | named | _BOUNDARIES)
        self._has_ids = names is None

    def __missing__(self, field: bytes) -> int:
        token = parse_id(field) if self._has_ids else -1
        if token < 0:
            kind = "a token id" if self._has_ids else "in the symbol table"
            raise ValueError(f"{_quoted(field)} is not {kind}")
        self[field] = token
        return token


class _Reader:
    """Reads an ARPA file in one pass, by columns of some thousands of lines."""

    def __init__(
        self,
        path: pathlib.Path,
        vocab_size: int | None,
        symbols: Sequence[str] | None,
    ) -> None:
        self.text = _Lines(path)
        # 0 until the unigrams are read.
        self.vocab_size = len(symbols) if symbols is not None else vocab_size or 0
        self._symbols = _Symbols(symbols)
        self._path = path

    @property
    def width(self) -> int:
        """Number of symbols."""
        return trie.symbol_width(self.vocab_size)

    def _fail(self, reason: str, line: np.int64 | int | None = None) -> NoReturn:
        raise UserError(f"{self._path}, line {line or self.text.number}: {reason}.")

    def _fail_at(self, section: _Section, wrong: Any, reason: str) -> None:
        """Fails at the first line of a section for which `wrong` holds, if any."""
        if wrong.any():
            self._fail(reason, int(section["line"][wrong].min()))

    def _next_line(self) -> bytes:
        """Returns the next line that is not blank."""
        while line := self.text.take(1):
            if line := line.strip(_BLANKS):
                return line
        raise UserError(
            f"{self._path} is truncated: it ends after line {self.text.number} "
            "without \\end\\."
        )

    def sections(self) -> list[_Section]:
        """Reads the whole file: the n-grams of each order, without unknown words."""
        sizes = self._sizes()
        sections = []
        with progress.bar(
            label="read ARPA", total=sum(sizes), unit=" n-grams", unit_scale=True
        ) as bar:
            for order, size in enumerate(sizes, start=1):
                section = self._section(order, size, order < len(sizes))
                bar.update(size)
                known = (section["symbols"] != _UNKNOWN).all(axis=1)
                section = section if known.all() else section[known]
                if order == 1 and not self.vocab_size:
                    self.vocab_size = int(section["symbols"].max(initial=0)) + 1
                trie.check_vocab_size(self.vocab_size, self._path)
                self._replace_names(section)
                sections.append(section)
        line = self._next_line()
        if line != b"\\end\\":
            self._fail(f"expected \\end\\, found {_quoted(line)}")
        while self.text.take(_ROWS):
            pass  # The checksum of a gzip file is at its end.
        return sections

    def _sizes(self) -> list[int]:
        """Parses the header: the number of n-grams of each order."""
        while self._next_line() != b"\\data\\":
            if self.text.number > 1000:
                self._fail("this is not an ARPA file: there is no \\data\\ line")
        sizes: list[int] = []
        while _SEPARATOR.split(line := self._next_line())[0] == b"ngram":
            order = len(sizes) + 1
            size = re.fullmatch(_SIZE % order, line)
            if size is None:
                self._fail(f"expected 'ngram {order}=NUMBER', found {_quoted(line)}")
            sizes.append(int(size[1]))
        if not sizes or not sizes[0]:
            self._fail("the model has no unigrams")
        if line != b"\\1-grams:":
            self._fail(f"expected \\1-grams:, found {_quoted(line)}")
        return sizes

    def _section(self, order: int, size: int, may_have_weight: bool) -> _Section:
        """Parses the n-grams of one order, of which the header announces `size`."""
        title = f"\\{order}-grams:".encode()
        if order > 1 and (line := self._next_line()) != title:
            self._fail(
                f"expected {title.decode()}, found {_quoted(line)}: the previous "
                "section has more n-grams than \\data\\ announces, or this section is "
                "missing"
            )
        # Arrays are allocated for existing lines, because the header may be wrong.
        parts, count = [np.empty(0, _fields(order))], 0
        while count < size:
            text = self.text.take(min(size - count, _ROWS))
            if not text:
                self._next_line()  # Reports the end of the file.
            parts.append(self._parse(text, order, size, may_have_weight))
            count += parts[-1].size
        return np.concatenate(parts)

    def _parse(
        self, text: bytes, order: int, size: int, may_have_weight: bool
    ) -> _Section:
        """Parses the n-grams of the lines that were taken last, column by column."""
        letters = np.frombuffer(text, np.uint8)
        inside = ~_IS_BLANK[letters]
        begins = inside & np.append(True, ~inside[:-1])
        # Number of fields of each line.
        widths = np.diff(np.cumsum(begins)[letters == ord("\n")], prepend=0)
        numbers = np.arange(-widths.size, 0) + self.text.number + 1
        wrong = (widths > 0) & (widths != order + 1) & (widths != order + 2)
        if wrong.any():
            index = int(np.argmax(wrong))
            line = text.split(b"\n")[index].strip(_BLANKS)
            reason = f"this is not a {order}-gram: {_quoted(line)}"
            if line.startswith(b"\\"):
                reason = (
                    f"{size} {order}-grams were announced, but this line is "
                    f"{_quoted(line)}"
                )
            self._fail(reason, numbers[index])
        numbers, widths = numbers[widths > 0], widths[widths > 0]
        # `bytes.split` is the fastest, but also splits at \v and \f.
        odd = b"\v" in text or b"\f" in text
        split = _SEPARATOR.split(text.strip(_BLANKS)) if odd else text.split()
        fields, first = np.array(split, object), np.cumsum(widths) - widths

        section = np.zeros(widths.size, _fields(order))
        section["line"] = numbers
        log_probs = self._logarithms(fields[first], numbers)
        reason = "the log-probability {} is above 0"
        self._check(log_probs <= 0, fields[first], numbers, reason)
        section["log_prob"] = log_probs
        for index in range(order):
            column = fields[first + index + 1]
            symbols = self._parsed(column, self._symbols.__getitem__, numbers)
            section["symbols"][:, index] = symbols
        given = widths == order + 2  # A missing weight is 0.
        column = fields[first[given] + order + 1]
        weights = self._logarithms(column, numbers[given])
        reason = f"the back-off weight {{}} of a {order}-gram, the highest order,"
        zero = (weights == 0) | may_have_weight
        self._check(zero, column, numbers[given], f"{reason} is not 0")
        section["log_backoff"][given] = np.where(np.isinf(weights), NEVER, weights)
        return section

    def _parsed(
        self, fields: np.ndarray, parse: Callable[[bytes], float], numbers: np.ndarray
    ) -> np.ndarray:
        """One field of each line, of which `numbers` are the numbers, as float64."""
        try:
            return np.fromiter(map(parse, fields), float, fields.size)
        except ValueError:
            for field, number in zip(fields, numbers, strict=True):
                try:
                    parse(field)
                except ValueError as error:
                    reason = f"{_quoted(field)} is not a number"
                    self._fail(reason if parse is float else str(error), number)
            raise

    def _logarithms(self, fields: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Natural logarithms of one field of each line, `[n]`."""
        with np.errstate(over="ignore"):
            values = self._parsed(fields, float, numbers) * _LOG10
        reason = "{} is not a logarithm of a probability"
        self._check(values < np.inf, fields, numbers, reason)
        return values

    def _check(
        self,
        right: np.ndarray,
        fields: np.ndarray,
        numbers: np.ndarray,
        reason: str,
    ) -> None:
        """Fails at the first line for whose field `right` does not hold, if any."""
        if not right.all():
            index = int(np.argmin(right))
            self._fail(reason.format(_quoted(fields[index])), numbers[index])

    def _replace_names(self, section: _Section) -> None:
        """Puts the symbols of `<s>` and `</s>`; checks those of the tokens."""
        symbols, size = section["symbols"], self.vocab_size
        outside = (symbols >= size).any(axis=1)
        self._fail_at(section, outside, f"a token is outside 0 ... {size - 1}")
        ends, begins = symbols[:, :-1] == _EOS, symbols[:, 1:] == _BOS
        misplaced = (ends | begins).any(axis=1)
        reason = "<s> must be the first and </s> the last symbol"
        self._fail_at(section, misplaced, reason)
        symbols[symbols == _EOS] = trie.eos_symbol(size)
        symbols[symbols == _BOS] = trie.bos_symbol(size)

    def closed(
        self, sections: list[_Section]
    ) -> tuple[list[np.ndarray], list[_Section]]:
        """Returns the keys of all n-grams, and the sections sorted by them.

        Suffixes that the file lacks are added.
        """
        while True:
            keys, sections = self._sorted(sections)
            missing = [link < 0 for link in trie.suffix_links(keys, self.width)]
            if not any(absent.any() for absent in missing):
                return keys, sections
            reason = "the suffix of this 2-gram is missing"
            self._fail_at(sections[1], missing[1], reason)
            for order in range(2, len(keys)):
                incomplete = sections[order][missing[order]]
                symbols, first = np.unique(
                    incomplete["symbols"][:, 1:], axis=0, return_index=True
                )
                suffixes = np.zeros(first.size, _fields(order))
                suffixes["symbols"], suffixes["log_prob"] = symbols, np.nan
                suffixes["line"] = incomplete["line"][first]
                sections[order - 1] = np.concatenate([sections[order - 1], suffixes])

    def _sorted(
        self, sections: list[_Section]
    ) -> tuple[list[np.ndarray], list[_Section]]:
        keys: list[np.ndarray] = []
        offsets: list[np.ndarray] = []
        result: list[_Section] = []
        for order, section in enumerate(sections, start=1):
            if not section.size:
                break
            symbols = section["symbols"].astype(np.int64)
            prefix = np.zeros(len(symbols), np.int64)
            for level in range(order - 1):
                prefix = trie.find(
                    keys[level], prefix, symbols[:, level], self.width, offsets[level]
                )
            reason = (
                f"the prefix of this {order}-gram is not one of the {order - 1}-grams"
            )
            self._fail_at(section, prefix < 0, reason)
            key = prefix * self.width + symbols[:, -1]
            if not (key[1:] > key[:-1]).all():
                by_key = np.argsort(key, kind="stable")
                key, section = key[by_key], section[by_key]
            repeated = np.append(False, key[1:] == key[:-1])
            self._fail_at(section, repeated, f"this {order}-gram is listed twice")
            offsets.append(trie.child_offsets([*keys, key], order - 1, self.width))
            keys.append(key)
            result.append(section)
        if any(section.size for section in sections[len(result) :]):
            order = len(result) + 1
            raise UserError(f"{self._path} has longer n-grams, but no {order}-grams.")
        return keys, result


def _quoted(text: bytes) -> str:
    """Returns bytes of the file as they appear in error messages."""
    return repr(text.decode("utf-8", "backslashreplace"))
