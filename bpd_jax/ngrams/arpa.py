"""ARPA files, plain or gzip: what SRILM, KenLM and OpenGrm read and write.

    \\data\\
    ngram 1=4
    ...
    \\1-grams:
    -0.30103    a    -0.17609

Logarithms are to base 10 and printed to seven digits. A symbol is a token's id in
decimal unless a table of strings is given; `<s>` and `</s>` are written so. `<s>` is
never predicted: its log-probability is written as -99.
"""

import array
import contextlib
import gzip
import io
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import IO, NoReturn

import numpy as np

from bpd_jax import files, progress
from bpd_jax.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.text_lines import numbered_lines

_LOG10 = math.log(10)
_NO_PROBABILITY = -99.0
_HIGHEST_ID = np.iinfo(np.int32).max
_ROWS = 100_000  # n-grams formatted at once


def write_arpa(
    model: NGramModel,
    path: str | os.PathLike[str],
    symbols: Sequence[str] | None = None,
) -> None:
    """Writes a model; a path that ends in `.gz` is compressed.

    The same model gives the same bytes.

    Args:
      model: the model.
      path: the file.
      symbols: V strings to write for the tokens, none empty or with blanks in it.

    Raises:
      UserError: the symbols do not fit, or the file cannot be written.
    """
    path = pathlib.Path(path)
    names = _symbol_names(model.vocab_size, symbols)
    with files.replacing_file(path) as temporary, open(temporary, "wb") as raw:
        if path.suffix == ".gz":
            # No name and no time in the header: equal models give equal bytes.
            with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
                _write(model, packed, names)
        else:
            _write(model, raw, names)


def _symbol_names(vocab_size: int, symbols: Sequence[str] | None) -> list[str]:
    if symbols is None:
        names = [str(token) for token in range(vocab_size)]
    else:
        names = list(symbols)
        if len(names) != vocab_size:
            raise UserError(
                f"the symbol table has {len(names)} entries for {vocab_size} tokens."
            )
        if any(len(name.split()) != 1 or name.strip() != name for name in names):
            raise UserError("a symbol of the table is empty or has a blank in it.")
    names += ["</s>", "<s>"]
    if len(set(names)) != len(names):
        raise UserError("two symbols of the table are equal, or one is <s> or </s>.")
    return names


def _write(
    model: NGramModel, target: IO[bytes] | gzip.GzipFile, names: list[str]
) -> None:
    text = io.TextIOWrapper(target, encoding="utf-8", newline="\n")
    text.write("\n\\data\\\n")
    for order, size in enumerate(model.sizes, start=1):
        text.write(f"ngram {order}={size}\n")
    with progress.bar(
        label="write ARPA", total=sum(model.sizes), unit=" n-grams", unit_scale=True
    ) as bar:
        for order in range(1, model.order + 1):
            text.write(f"\n\\{order}-grams:\n")
            for lines in _lines(model, order, names):
                text.write("".join(lines))
                bar.update(len(lines))
    text.write("\n\\end\\\n")
    text.detach()


def _lines(model: NGramModel, order: int, names: list[str]) -> Iterator[list[str]]:
    rows = model.ngrams(order)
    log_probs = model.log_probs[order - 1]
    scores = np.where(np.isneginf(log_probs), _NO_PROBABILITY, log_probs / _LOG10)
    is_history = trie.child_counts(model.keys, order, model.width) > 0
    if order == 1 and model.order > 1:
        is_history |= rows[:, 0] == model.bos
    weights = np.full(len(rows), np.nan)
    if order < model.order:
        weights[is_history] = model.log_backoffs[order - 1][is_history] / _LOG10
    for begin in range(0, len(rows), _ROWS):
        part = slice(begin, begin + _ROWS)
        yield [
            f"{score:.7g}\t{' '.join([names[symbol] for symbol in row])}"
            + (f"\t{weight:.7g}\n" if weight == weight else "\n")
            for row, score, weight in zip(
                rows[part].tolist(),
                scores[part].tolist(),
                weights[part].tolist(),
                strict=True,
            )
        ]


def read_arpa(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    symbols: Sequence[str] | None = None,
    end_of_text: int | None = None,
) -> NGramModel:
    """Reads a model; whatever is wrong with the file is told with its line.

    Args:
      path: an ARPA file; gzip is recognised by its content.
      vocab_size: V; by default the length of `symbols`, or else the highest id plus 1.
      symbols: the strings of the tokens 0 ... V-1; by default tokens are decimal ids.
      end_of_text: the model's, see `NGramModel`.

    Raises:
      UserError: the file is missing, cut short, inconsistent, or holds numbers or
        tokens that cannot be.
    """
    path = pathlib.Path(path)
    if symbols is not None:
        vocab_size = len(symbols)
    names = None if symbols is None else _symbol_names(len(symbols), symbols)
    ids = None if names is None else {name: token for token, name in enumerate(names)}
    with contextlib.closing(numbered_lines(path)) as lines:
        reader = _Reader(path, lines, ids, vocab_size)
        return reader.read(end_of_text)


class _Reader:
    """One pass over the lines of an ARPA file."""

    def __init__(
        self,
        path: pathlib.Path,
        lines: Iterator[tuple[int, bytes]],
        ids: dict[str, int] | None,
        vocab_size: int | None,
    ) -> None:
        self._path = path
        self._lines = lines
        self._ids = ids
        self._vocab_size = vocab_size
        self._number = 0

    def read(self, end_of_text: int | None) -> NGramModel:
        sizes = self._sizes()
        sections = []
        for order, size in progress.bar(
            list(enumerate(sizes, start=1)), label="read ARPA", unit=" orders"
        ):
            sections.append(self._section(order, size, len(sizes)))
            if self._vocab_size is None:
                self._vocab_size = int(sections[0][0].max()) + 1
        line = self._next_line()
        if line != "\\end\\":
            self._fail(f"expected \\end\\, found {line!r}")
        for _ in self._lines:
            pass  # The checksum of a gzip file comes at its very end.
        return self._model(sections, end_of_text)

    def _fail(self, what: str, number: int | None = None) -> NoReturn:
        raise UserError(f"{self._path}, line {number or self._number}: {what}.")

    def _next_line(self) -> str:
        """Returns the next line that is not empty."""
        for number, line in self._lines:
            self._number = number
            if line := line.strip():
                try:
                    return line.decode("utf-8")
                except UnicodeDecodeError:
                    self._fail("this is not UTF-8 text")
        raise UserError(
            f"{self._path} is cut short: it ends after line {self._number} without "
            "\\end\\."
        )

    def _sizes(self) -> list[int]:
        while self._next_line() != "\\data\\":
            if self._number > 1000:
                self._fail("this is no ARPA file: there is no \\data\\ line")
        sizes: list[int] = []
        while (line := self._next_line()).startswith("ngram "):
            order, equals, size = line[len("ngram ") :].partition("=")
            if not equals or order.strip() != str(len(sizes) + 1):
                self._fail(f"expected 'ngram {len(sizes) + 1}=', found {line!r}")
            if not size.strip().isdecimal():
                self._fail(f"the number of n-grams is no number: {line!r}")
            sizes.append(int(size))
        if not sizes or not sizes[0]:
            self._fail("the model has no unigrams")
        if line != "\\1-grams:":
            self._fail(f"expected \\1-grams:, found {line!r}")
        return sizes

    def _section(
        self, order: int, size: int, highest: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns symbols `[n, order]`, log-probabilities, weights and line numbers."""
        if order > 1 and (line := self._next_line()) != f"\\{order}-grams:":
            self._fail(
                f"expected \\{order}-grams:, found {line!r}: the section before has "
                "more n-grams than \\data\\ says, or this one is missing"
            )
        # These grow with what is there: the announced size may be nonsense.
        symbols, numbers = array.array("q"), array.array("q")
        scores, weights = array.array("d"), array.array("d")
        for _ in range(size):
            fields = self._next_line().split()
            if fields[0].startswith("\\"):
                self._fail(
                    f"{size} {order}-grams were announced, but here is {fields[0]}"
                )
            with_weight = len(fields) == order + 2 and order < highest
            if len(fields) != order + 1 and not with_weight:
                self._fail(f"this is no {order}-gram: {' '.join(fields)!r}")
            symbols.extend([self._symbol(name) for name in fields[1 : order + 1]])
            scores.append(self._logarithm(fields[0]))
            if scores[-1] > 0:
                self._fail(f"the log-probability {fields[0]} is above 0")
            weights.append(self._logarithm(fields[-1]) if with_weight else 0.0)
            if math.isinf(weights[-1]):
                self._fail(f"the back-off weight {fields[-1]} is not finite")
            numbers.append(self._number)
        return (
            np.array(symbols, np.int64).reshape(-1, order),
            np.array(scores, np.float64),
            np.array(weights, np.float64),
            np.array(numbers, np.int64),
        )

    def _logarithm(self, field: str) -> float:
        try:
            value = float(field)
        except ValueError:
            self._fail(f"{field!r} is no number")
        if math.isnan(value) or value == math.inf:
            self._fail(f"{field} is no logarithm")
        return value * _LOG10

    def _symbol(self, name: str) -> int:
        """Returns a token's id; -1 for `</s>` and -2 for `<s>`."""
        if name == "</s>":
            return -1
        if name == "<s>":
            return -2
        if self._ids is not None:
            token = self._ids.get(name, -1)
        else:
            token = int(name) if name.isascii() and name.isdigit() else -1
        if not 0 <= token <= _HIGHEST_ID or (
            self._vocab_size is not None and token >= self._vocab_size
        ):
            self._fail(f"{name!r} is not a token of the vocabulary")
        return token

    def _model(
        self,
        sections: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
        end_of_text: int | None,
    ) -> NGramModel:
        assert self._vocab_size is not None
        width = trie.symbol_width(self._vocab_size)
        keys: list[np.ndarray] = []
        log_probs: list[np.ndarray] = []
        log_backoffs: list[np.ndarray] = []
        for order, (rows, scores, weights, numbers) in enumerate(sections, start=1):
            rows = np.where(rows == -1, trie.eos_symbol(self._vocab_size), rows)
            rows = np.where(rows == -2, trie.bos_symbol(self._vocab_size), rows)
            parents = self._find(keys, rows[:, :-1], width)
            suffixes = self._find(keys, rows[:, 1:], width)
            for found, part in ((parents, "beginning"), (suffixes, "end")):
                missing = np.flatnonzero(found < 0)
                if missing.size:
                    self._fail(
                        f"this {order}-gram's {part}, without the other outer symbol, "
                        f"is not among the {order - 1}-grams",
                        numbers[missing[0]],
                    )
            key = parents * width + rows[:, -1]
            by_key = np.argsort(key, kind="stable")
            key = key[by_key]
            twice = np.flatnonzero(key[1:] == key[:-1])
            if twice.size:
                again = numbers[by_key[twice[0] + 1]]
                self._fail(f"this {order}-gram is there twice", again)
            keys.append(key)
            log_probs.append(scores[by_key])
            log_backoffs.append(weights[by_key])
        bos = keys[0] == trie.bos_symbol(self._vocab_size)
        log_probs[0][bos] = -np.inf
        while len(keys) > 1 and not keys[-1].size:
            del keys[-1], log_probs[-1], log_backoffs[-1]
        return NGramModel(
            vocab_size=self._vocab_size,
            keys=tuple(keys),
            log_probs=tuple(log_probs),
            log_backoffs=tuple(log_backoffs[:-1]),
            end_of_text=end_of_text,
        )

    @staticmethod
    def _find(keys: list[np.ndarray], rows: np.ndarray, width: int) -> np.ndarray:
        index = np.zeros(len(rows), np.int64)
        for column in range(rows.shape[1]):
            index = trie.find(keys[column], index, rows[:, column], width)
        return index
