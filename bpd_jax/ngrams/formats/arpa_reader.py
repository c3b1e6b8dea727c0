"""Parses the text of an ARPA file into a model; see `formats.arpa`."""

import math
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import NEVER
from bpd_jax.ngrams.counting.token_files import parse_id
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.text_blocks import TextBlocks

_LOG10 = math.log(10)

# Placeholders until V is known.
_EOS, _BOS, _UNKNOWN = -1, -2, -3
_BOUNDARIES = {"</s>": _EOS, "<s>": _BOS}
_UNKNOWNS = {"<unk>": _UNKNOWN, "<UNK>": _UNKNOWN}

# Only these separate fields; a name may contain any other character.
_BLANKS = b" \t\r\n"
_SEPARATOR = re.compile(rb"[ \t\r\n]+")

# Number of n-grams parsed at once.
_ROWS = 1 << 16

_NOT_CLOSED = "the {} of this {}-gram is not one of the {}-grams"


# One n-gram: its symbols, log-probability, back-off weight and line number.
_Line = tuple[list[int], float, float, int]


class _Section(NamedTuple):
    """The n-grams of one order, in the order of the file.

    Attributes:
      symbols: `[n, order]` int32.
      log_probs: `[n]`; NaN for an n-gram that the file lacks and the reader adds.
      log_backoffs: `[n]`.
      lines: `[n]` int64, line numbers.
    """

    symbols: np.ndarray
    log_probs: np.ndarray
    log_backoffs: np.ndarray
    lines: np.ndarray

    def select(self, indices: np.ndarray) -> "_Section":
        return _Section(*(array[indices] for array in self))


def _concatenate(parts: Sequence[_Section]) -> _Section:
    return _Section(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class ArpaReader:
    """Reads an ARPA file in one pass.

    A compiled loop parses lines of the usual form, 30 times as fast as Python. All
    other lines are parsed in Python, which also reports errors.
    """

    def __init__(
        self,
        path: pathlib.Path,
        vocab_size: int | None,
        symbols: Sequence[str] | None,
    ) -> None:
        self._path = path
        self._text = TextBlocks(path)
        self._vocab_size = vocab_size
        self._has_ids = symbols is None
        ids = {name: token for token, name in enumerate(symbols or ())}
        named = _UNKNOWNS | ids | _BOUNDARIES
        self._symbols = {name.encode(): i for name, i in named.items()}
        self._names: dict[bytes, int] = {}

    def close(self) -> None:
        """Closes the file."""
        self._text.close()

    def read(self, end_of_text: int | None) -> NGramModel:
        """Reads the file; see `read_arpa`."""
        sizes = self._sizes()
        sections = []
        with progress.bar(
            label="read ARPA", total=sum(sizes), unit=" n-grams", unit_scale=True
        ) as bar:
            for order, size in enumerate(sizes, start=1):
                section = self._section(order, size, len(sizes), bar)
                in_vocabulary = (section.symbols != _UNKNOWN).all(axis=1)
                sections.append(
                    section if in_vocabulary.all() else section.select(in_vocabulary)
                )
        line = self._next_line()
        if line != b"\\end\\":
            self._fail(f"expected \\end\\, found {_quoted(line)}")
        while self._text.next_line() is not None:
            pass  # The checksum of a gzip file is at its end.
        return self._model(sections, end_of_text)

    def _fail(self, reason: str, line: int | None = None) -> NoReturn:
        raise UserError(f"{self._path}, line {line or self._text.number}: {reason}.")

    def _next_line(self) -> bytes:
        """Returns the next line that is not blank."""
        while (line := self._text.next_line()) is not None:
            if line := line.strip(_BLANKS):
                return line
        raise UserError(
            f"{self._path} is truncated: it ends after line {self._text.number} "
            "without \\end\\."
        )

    def _sizes(self) -> list[int]:
        """Parses the header: the number of n-grams of each order."""
        while self._next_line() != b"\\data\\":
            if self._text.number > 1000:
                self._fail("this is not an ARPA file: there is no \\data\\ line")
        sizes: list[int] = []
        while (line := self._next_line()).startswith(b"ngram "):
            order = len(sizes) + 1
            size = re.fullmatch(rb"ngram\s+%d\s*=\s*(\d{1,18})" % order, line)
            if size is None:
                self._fail(f"expected 'ngram {order}=NUMBER', found {_quoted(line)}")
            sizes.append(int(size[1]))
        if not sizes or not sizes[0]:
            self._fail("the model has no unigrams")
        if line != b"\\1-grams:":
            self._fail(f"expected \\1-grams:, found {_quoted(line)}")
        return sizes

    def _section(
        self, order: int, size: int, highest: int, bar: "progress.tqdm"
    ) -> _Section:
        """Parses the n-grams of one order.

        Args:
          order: the order.
          size: number of n-grams that the header announces.
          highest: the highest order of the model.
          bar: progress bar to advance.
        """
        title = f"\\{order}-grams:".encode()
        if order > 1 and (line := self._next_line()) != title:
            self._fail(
                f"expected {title.decode()}, found {_quoted(line)}: the previous "
                "section has more n-grams than \\data\\ announces, or this section is "
                "missing"
            )
        # Arrays are allocated for existing lines, because the header may be wrong.
        parts = [_as_section(order, [])]
        if order == 1:
            lines = [self._line(order, size, order < highest) for _ in range(size)]
            self._index_names()
            if self._vocab_size is None:
                self._vocab_size = max(*self._names.values(), 0) + 1
            trie.check_vocab_size(self._vocab_size, self._path)
            bar.update(size)
            return _as_section(order, lines)
        count = 0
        while count < size:
            part = self._parse_block(order, size - count, order < highest)
            if not part.lines.size:
                part = _as_section(order, [self._line(order, size, order < highest)])
            parts.append(part)
            count += part.lines.size
            bar.update(part.lines.size)
        return _concatenate(parts)

    def _parse_block(self, order: int, limit: int, may_have_weight: bool) -> _Section:
        """Parses up to `limit` n-grams, and stops at a line of unusual form."""
        from bpd_jax.ngrams.formats import arpa_kernels

        text = self._text
        text.fill()
        limit = min(limit, _ROWS)
        names = np.empty((limit, order), np.int32)
        log_probs, log_backoffs = np.empty((2, limit))
        lines = np.empty(limit, np.int64)
        text.at, count, num_lines = arpa_kernels.parse_ngrams(
            text.block,
            text.at,
            may_have_weight,
            self._name_letters,
            self._name_table,
            names,
            log_probs,
            log_backoffs,
            lines,
        )
        section = _Section(
            self._name_symbols[names[:count]],
            log_probs[:count] * _LOG10,
            log_backoffs[:count] * _LOG10,
            lines[:count] + text.number + 1,
        )
        text.number += num_lines
        return section

    def _line(self, order: int, size: int, may_have_weight: bool) -> _Line:
        """Parses the next n-gram, in any valid form."""
        line = self._next_line()
        fields = _SEPARATOR.split(line)
        if line.startswith(b"\\"):
            self._fail(
                f"{size} {order}-grams were announced, but this line is {_quoted(line)}"
            )
        has_weight = len(fields) == order + 2
        if len(fields) != order + 1 and not has_weight:
            self._fail(f"this is not a {order}-gram: {_quoted(line)}")
        if has_weight and not may_have_weight and self._logarithm(fields[-1]) != 0:
            self._fail(
                f"the back-off weight {_quoted(fields[-1])} of a {order}-gram, the "
                "highest order, is not 0"
            )
        symbols = [self._symbol(name) for name in fields[1 : order + 1]]
        log_prob = self._logarithm(fields[0])
        if log_prob > 0:
            self._fail(f"the log-probability {_quoted(fields[0])} is above 0")
        log_backoff = self._logarithm(fields[-1]) if has_weight else 0.0
        if order == 1:
            if fields[1] in self._names:
                self._fail("this 1-gram is listed twice")
            self._names[fields[1]] = symbols[0]
        log_backoff = NEVER if math.isinf(log_backoff) else log_backoff
        return symbols, log_prob, log_backoff, self._text.number

    def _logarithm(self, field: bytes) -> float:
        try:
            value = float(field)
        except ValueError:
            self._fail(f"{_quoted(field)} is not a number")
        if math.isnan(value) or value == math.inf:
            self._fail(f"{_quoted(field)} is not a logarithm of a probability")
        return value * _LOG10

    def _symbol(self, field: bytes) -> int:
        if field in self._symbols:
            return self._symbols[field]
        token = parse_id(field) if self._has_ids else -1
        if token < 0 or (self._vocab_size is not None and token >= self._vocab_size):
            self._fail(f"{_quoted(field)} is not a token of the vocabulary")
        return token

    def _index_names(self) -> None:
        """Builds the hash table of the unigrams' names for the compiled loop."""
        from bpd_jax.ngrams.formats import arpa_kernels

        names = list(self._names)
        begins = np.cumsum([0, *map(len, names)])
        self._name_letters = np.frombuffer(b"".join(names), np.uint8), begins
        self._name_symbols = np.array(list(self._names.values()), np.int32)
        self._name_table = np.full(2 * len(names) + 1, -1, np.int32)
        arpa_kernels.fill_table(self._name_letters, self._name_table)

    def _model(self, sections: list[_Section], end_of_text: int | None) -> NGramModel:
        """Sorts the n-grams, adds missing suffixes and returns the model."""
        assert self._vocab_size is not None
        vocab_size = self._vocab_size
        for section in sections:
            symbols = section.symbols
            misplaced = (symbols[:, :-1] == _EOS).any(axis=1)
            misplaced |= (symbols[:, 1:] == _BOS).any(axis=1)
            if misplaced.any():
                line = int(section.lines[misplaced].min())
                self._fail("<s> must be the first and </s> the last symbol", line)
            symbols[symbols == _EOS] = trie.eos_symbol(vocab_size)
            symbols[symbols == _BOS] = trie.bos_symbol(vocab_size)
        width = trie.symbol_width(vocab_size)
        while True:
            keys, sections = self._sorted(sections, width)
            links = trie.suffix_links(keys, width)
            missing = [np.flatnonzero(link < 0) for link in links]
            if not any(indices.size for indices in missing):
                break
            if missing[1].size:
                line = int(sections[1].lines[missing[1]].min())
                self._fail(_NOT_CLOSED.format("suffix", 2, 1), line)
            for order in range(2, len(keys)):
                suffixes = _suffixes(sections[order].select(missing[order]))
                sections[order - 1] = _concatenate([sections[order - 1], suffixes])
        log_probs: list[np.ndarray] = []
        for order, section in enumerate(sections):
            added = np.flatnonzero(np.isnan(section.log_probs))
            if added.size:
                weights = sections[order - 1].log_backoffs[keys[order][added] // width]
                section.log_probs[added] = weights + log_probs[-1][links[order][added]]
            log_probs.append(section.log_probs)
        log_probs[0][keys[0] == trie.bos_symbol(vocab_size)] = -np.inf
        return NGramModel(
            vocab_size=vocab_size,
            keys=tuple(keys),
            log_probs=tuple(log_probs),
            log_backoffs=tuple(section.log_backoffs for section in sections[:-1]),
            end_of_text=end_of_text,
        )

    def _sorted(
        self, sections: list[_Section], width: int
    ) -> tuple[list[np.ndarray], list[_Section]]:
        """Returns the keys of all n-grams, and the sections sorted by them."""
        keys: list[np.ndarray] = []
        offsets: list[np.ndarray] = []
        result: list[_Section] = []
        for order, section in enumerate(sections, start=1):
            if not section.lines.size:
                break
            symbols = section.symbols.astype(np.int64)
            prefix = np.zeros(len(symbols), np.int64)
            for level in range(order - 1):
                prefix = trie.find(
                    keys[level], prefix, symbols[:, level], width, offsets[level]
                )
            missing = np.flatnonzero(prefix < 0)
            if missing.size:
                line = int(section.lines[missing].min())
                self._fail(_NOT_CLOSED.format("prefix", order, order - 1), line)
            key = prefix * width + symbols[:, -1]
            if not (key[1:] > key[:-1]).all():
                by_key = np.argsort(key, kind="stable")
                key, section = key[by_key], section.select(by_key)
            repeated = np.flatnonzero(key[1:] == key[:-1])
            if repeated.size:
                line = int(section.lines[repeated + 1].min())
                self._fail(f"this {order}-gram is listed twice", line)
            offsets.append(trie.child_offsets([*keys, key], order - 1, width))
            keys.append(key)
            result.append(section)
        if any(section.lines.size for section in sections[len(result) :]):
            order = len(result) + 1
            raise UserError(f"{self._path} has longer n-grams, but no {order}-grams.")
        return keys, result


def _suffixes(section: _Section) -> _Section:
    """Returns the distinct suffixes of n-grams, without log-probabilities."""
    symbols, first = np.unique(section.symbols[:, 1:], axis=0, return_index=True)
    absent = np.full(len(symbols), np.nan)
    return _Section(symbols, absent, np.zeros(len(symbols)), section.lines[first])


def _as_section(order: int, lines: Sequence[_Line]) -> _Section:
    columns = zip(*lines, strict=True) if lines else [()] * 4
    symbols, log_probs, log_backoffs, numbers = columns
    return _Section(
        np.array(symbols, np.int32).reshape(-1, order),
        np.array(log_probs, np.float64),
        np.array(log_backoffs, np.float64),
        np.array(numbers, np.int64),
    )


def _quoted(text: bytes) -> str:
    """Returns bytes of the file as they appear in error messages."""
    return repr(text.decode("utf-8", "backslashreplace"))
