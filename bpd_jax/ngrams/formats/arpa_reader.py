"""The way from the text of an ARPA file to a model; `formats.arpa` opens it."""

import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from bpd_jax import progress
from bpd_jax.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import NEVER
from bpd_jax.ngrams.formats.symbols import BOUNDARIES, UNKNOWN
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.text_blocks import TextBlocks

_LOG10 = math.log(10)
_HIGHEST_ID = np.iinfo(np.int32).max
_MOST_DIGITS = 18  # of an integer; Python refuses to convert thousands of them.

# Symbols while V is not known yet.
_EOS, _BOS, _UNKNOWN = -1, -2, -3


# n-grams read at once.
_ROWS = 1 << 16

_NOT_CLOSED = (
    "this {}-gram's {}, without the other outer symbol, is not among the {}-grams"
)


class _Line(NamedTuple):
    """One n-gram: symbols, logarithms and the number of its line."""

    row: list[int]
    score: float
    weight: float
    number: int


class _Section(NamedTuple):
    """The n-grams of one order as in the file.

    Attributes:
      rows: symbols, `[n, order]` int32.
      scores: log-probabilities, `[n]`; NaN where an n-gram was put in.
      weights: natural logarithms of the back-off weights, `[n]`.
      lines: where each stands, `[n]` int64.
    """

    rows: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    lines: np.ndarray

    def taken(self, which: np.ndarray) -> "_Section":
        return _Section(*(array[which] for array in self))


def _joined(parts: Sequence[_Section]) -> _Section:
    return _Section(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class ArpaReader:
    """One pass over the lines of an ARPA file.

    A compiled loop reads the ordinary lines, 30 times as fast as Python reads them. Any
    other line is read by Python, which also reports what is wrong with it.
    """

    def __init__(
        self,
        path: pathlib.Path,
        vocab_size: int | None,
        symbols: Sequence[str] | None,
        unknown: int | None,
    ) -> None:
        self._path = path
        self._text = TextBlocks(path)
        self._vocab_size = vocab_size
        self._ids: dict[str, int] | None = None
        if symbols is not None:
            self._ids = {name: token for token, name in enumerate(symbols)}
        self._unknown = _UNKNOWN if unknown is None else unknown
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
                in_vocabulary = (section.rows != _UNKNOWN).all(axis=1)
                sections.append(
                    section if in_vocabulary.all() else section.taken(in_vocabulary)
                )
        line = self._next_line()
        if line != b"\\end\\":
            self._fail(f"expected \\end\\, found {_shown(line)}")
        while self._text.next_line() is not None:
            pass  # The checksum of a gzip file comes at its very end.
        return self._model(sections, end_of_text)

    def _fail(self, reason: str, line: int | None = None) -> NoReturn:
        raise UserError(f"{self._path}, line {line or self._text.number}: {reason}.")

    def _next_line(self) -> bytes:
        """Returns the next line that is not empty."""
        while (line := self._text.next_line()) is not None:
            if line := line.strip():
                return line
        raise UserError(
            f"{self._path} is cut short: it ends after line {self._text.number} "
            "without \\end\\."
        )

    def _sizes(self) -> list[int]:
        while (line := self._next_line()) != b"\\data\\":
            self._decoded(line)
            if self._text.number > 1000:
                self._fail("this is no ARPA file: there is no \\data\\ line")
        sizes: list[int] = []
        while (line := self._next_line()).startswith(b"ngram "):
            order, equals, size = self._decoded(line)[len("ngram ") :].partition("=")
            if not equals or order.strip() != str(len(sizes) + 1):
                self._fail(f"expected 'ngram {len(sizes) + 1}=', found {_shown(line)}")
            if not _is_integer(size.strip()):
                self._fail(f"the number of n-grams is no number: {_shown(line)}")
            sizes.append(int(size))
        if not sizes or not sizes[0]:
            self._fail("the model has no unigrams")
        if line != b"\\1-grams:":
            self._fail(f"expected \\1-grams:, found {_shown(line)}")
        return sizes

    def _section(
        self, order: int, size: int, highest: int, bar: "progress.tqdm"
    ) -> _Section:
        title = f"\\{order}-grams:".encode()
        if order > 1 and (line := self._next_line()) != title:
            self._fail(
                f"expected {title.decode()}, found {_shown(line)}: the section before "
                "has more n-grams than \\data\\ says, or this one is missing"
            )
        # These grow with what is there: the announced size may be nonsense.
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
            part = self._ordinary_lines(order, size - count, order < highest)
            if not part.lines.size:
                part = _as_section(order, [self._line(order, size, order < highest)])
            parts.append(part)
            count += part.lines.size
            bar.update(part.lines.size)
        return _joined(parts)

    def _ordinary_lines(self, order: int, most: int, may_have_weight: bool) -> _Section:
        """Takes the n-grams that follow, up to a line that is not quite ordinary."""
        from bpd_jax.ngrams.formats import arpa_kernels

        text = self._text
        text.fill()
        most = min(most, _ROWS)
        rows = np.empty((most, order), np.int32)
        scores, weights = np.empty((2, most))
        lines = np.empty(most, np.int64)
        text.at, count, passed = arpa_kernels.parse_ngrams(
            text.block,
            text.at,
            may_have_weight,
            self._name_letters,
            self._name_table,
            rows,
            scores,
            weights,
            lines,
        )
        section = _Section(
            self._name_symbols[rows[:count]],
            scores[:count] * _LOG10,
            weights[:count] * _LOG10,
            lines[:count] + text.number + 1,
        )
        text.number += passed
        return section

    def _line(self, order: int, size: int, may_have_weight: bool) -> _Line:
        """Takes the next n-gram, whatever it looks like."""
        line = self._next_line()
        fields = line.split()
        if line.startswith(b"\\"):
            self._fail(
                f"{size} {order}-grams were announced, but here is {_shown(line)}"
            )
        has_weight = len(fields) == order + 2 and may_have_weight
        if len(fields) != order + 1 and not has_weight:
            self._fail(f"this is no {order}-gram: {_shown(line)}")
        row = [self._symbol(name) for name in fields[1 : order + 1]]
        score = self._logarithm(fields[0])
        if score > 0:
            self._fail(f"the log-probability {_shown(fields[0])} is above 0")
        weight = self._logarithm(fields[-1]) if has_weight else 0.0
        if order == 1:
            if fields[1] in self._names:
                self._fail("this 1-gram is there twice")
            self._names[fields[1]] = row[0]
        weight = NEVER if math.isinf(weight) else weight
        return _Line(row, score, weight, self._text.number)

    def _decoded(self, text: bytes) -> str:
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            self._fail("this is not UTF-8 text")

    def _logarithm(self, field: bytes) -> float:
        try:
            value = float(field)
        except ValueError:
            self._fail(f"{_shown(field)} is no number")
        if math.isnan(value) or value == math.inf:
            self._fail(f"{_shown(field)} is no logarithm")
        return value * _LOG10

    def _symbol(self, field: bytes) -> int:
        name = self._decoded(field)
        if name == BOUNDARIES[0]:
            return _EOS
        if name == BOUNDARIES[1]:
            return _BOS
        if self._ids is not None and name in self._ids:
            return self._ids[name]
        if name in UNKNOWN:
            return self._unknown
        token = -1
        if self._ids is None and _is_integer(name):
            token = int(name)
        if not 0 <= token <= _HIGHEST_ID or (
            self._vocab_size is not None and token >= self._vocab_size
        ):
            self._fail(f"{_shown(field)} is not a token of the vocabulary")
        return token

    def _index_names(self) -> None:
        """Prepares the names of the unigrams for the compiled loop."""
        from bpd_jax.ngrams.formats import arpa_kernels

        names = list(self._names)
        begins = np.cumsum([0, *map(len, names)])
        self._name_letters = np.frombuffer(b"".join(names), np.uint8), begins
        self._name_symbols = np.array(list(self._names.values()), np.int32)
        self._name_table = np.full(2 * len(names) + 1, -1, np.int32)
        arpa_kernels.fill_table(self._name_letters, self._name_table)

    def _model(self, sections: list[_Section], end_of_text: int | None) -> NGramModel:
        assert self._vocab_size is not None
        vocab_size = self._vocab_size
        for section in sections:
            misplaced = (section.rows[:, :-1] == _EOS).any(axis=1)
            misplaced |= (section.rows[:, 1:] == _BOS).any(axis=1)
            if misplaced.any():
                line = int(section.lines[misplaced].min())
                self._fail("<s> is only first and </s> only last", line)
            section.rows[section.rows == _EOS] = trie.eos_symbol(vocab_size)
            section.rows[section.rows == _BOS] = trie.bos_symbol(vocab_size)
        width = trie.symbol_width(vocab_size)
        while True:
            keys, sections = self._sorted(sections, width)
            links = trie.suffix_links(keys, width)
            missing = [np.flatnonzero(link < 0) for link in links]
            if not any(indices.size for indices in missing):
                break
            if missing[1].size:
                line = int(sections[1].lines[missing[1]].min())
                self._fail(_NOT_CLOSED.format(2, "end", 1), line)
            for order in range(2, len(keys)):
                needy = sections[order].taken(missing[order])
                sections[order - 1] = _joined([sections[order - 1], _suffixes(needy)])
        log_probs: list[np.ndarray] = []
        for order, section in enumerate(sections):
            scores = section.scores
            new = np.flatnonzero(np.isnan(scores))
            if new.size:
                weights = sections[order - 1].weights[keys[order][new] // width]
                scores[new] = weights + log_probs[-1][links[order][new]]
            log_probs.append(scores)
        log_probs[0][keys[0] == trie.bos_symbol(vocab_size)] = -np.inf
        return NGramModel(
            vocab_size=vocab_size,
            keys=tuple(keys),
            log_probs=tuple(log_probs),
            log_backoffs=tuple(section.weights for section in sections[:-1]),
            end_of_text=end_of_text,
        )

    def _sorted(
        self, sections: list[_Section], width: int
    ) -> tuple[list[np.ndarray], list[_Section]]:
        """Returns the keys of all n-grams, and the sections in their order."""
        keys: list[np.ndarray] = []
        offsets: list[np.ndarray] = []
        result: list[_Section] = []
        for order, section in enumerate(sections, start=1):
            if not section.lines.size:
                break
            rows = section.rows.astype(np.int64)
            prefix = np.zeros(len(rows), np.int64)
            for level in range(order - 1):
                prefix = trie.find(
                    keys[level], prefix, rows[:, level], width, offsets[level]
                )
            orphans = np.flatnonzero(prefix < 0)
            if orphans.size:
                line = int(section.lines[orphans].min())
                self._fail(_NOT_CLOSED.format(order, "beginning", order - 1), line)
            key = prefix * width + rows[:, -1]
            if not (key[1:] > key[:-1]).all():
                by_key = np.argsort(key, kind="stable")
                key, section = key[by_key], section.taken(by_key)
            twice = np.flatnonzero(key[1:] == key[:-1])
            if twice.size:
                again = int(section.lines[twice + 1].min())
                self._fail(f"this {order}-gram is there twice", again)
            offsets.append(trie.child_offsets([*keys, key], order - 1, width))
            keys.append(key)
            result.append(section)
        if any(section.lines.size for section in sections[len(result) :]):
            order = len(result) + 1
            raise UserError(f"{self._path} has no {order}-grams, but longer ones.")
        return keys, result


def _suffixes(section: _Section) -> _Section:
    """Returns the suffixes of n-grams, each once, without scores."""
    rows, first = np.unique(section.rows[:, 1:], axis=0, return_index=True)
    return _Section(
        rows, np.full(len(rows), np.nan), np.zeros(len(rows)), section.lines[first]
    )


def _as_section(order: int, lines: Sequence[_Line]) -> _Section:
    return _Section(
        np.array([line.row for line in lines], np.int32).reshape(-1, order),
        np.array([line.score for line in lines], np.float64),
        np.array([line.weight for line in lines], np.float64),
        np.array([line.number for line in lines], np.int64),
    )


def _shown(text: bytes) -> str:
    """Returns part of the file for a message."""
    return repr(text.decode("utf-8", "backslashreplace"))


def _is_integer(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
