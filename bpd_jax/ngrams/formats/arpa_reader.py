"""Reads ARPA files into models; see `formats.arpa`."""

import contextlib
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import NEVER
from bpd_jax.ngrams.counting.token_files import TextBlocks, parse_id
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.storage.paths import as_path

_LOG10 = math.log(10)

# Stand for other symbols until V is known; those of `arpa_kernels`.
_EOS, _BOS, _UNKNOWN = -1, -2, -3
_BOUNDARIES = {b"</s>": _EOS, b"<s>": _BOS}
_UNKNOWNS = {b"<unk>": _UNKNOWN, b"<UNK>": _UNKNOWN}

# Only these separate fields; a name may contain any other character.
_BLANKS = b" \t\r\n"
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


class _Reader:
    """Reads an ARPA file in one pass.

    A compiled loop parses lines of ids in the usual form, 30 times as fast as Python.
    All other lines are parsed in Python, which also reports errors.
    """

    def __init__(
        self,
        path: pathlib.Path,
        vocab_size: int | None,
        symbols: Sequence[str] | None,
    ) -> None:
        self.text = TextBlocks(path)
        # 0 until the unigrams are read.
        self.vocab_size = len(symbols) if symbols is not None else vocab_size or 0
        self._has_ids = symbols is None
        named = {name.encode(): token for token, name in enumerate(symbols or ())}
        self._names = _UNKNOWNS | named | _BOUNDARIES
        self._path = path

    @property
    def width(self) -> int:
        """Number of symbols."""
        return trie.symbol_width(self.vocab_size)

    def _fail(self, reason: str, line: int | None = None) -> NoReturn:
        raise UserError(f"{self._path}, line {line or self.text.number}: {reason}.")

    def _fail_at(self, section: _Section, wrong: Any, reason: str) -> None:
        """Fails at the first line of a section for which `wrong` holds, if any."""
        if wrong.any():
            self._fail(reason, int(section["line"][wrong].min()))

    def _next_line(self) -> bytes:
        """Returns the next line that is not blank."""
        while (line := self.text.next_line()) is not None:
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
        while self.text.next_line() is not None:
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
        parts, count = [self._parse_block(order, 0, may_have_weight)], 0
        while count < size:
            part = parts[0]
            if self._has_ids:
                part = self._parse_block(order, size - count, may_have_weight)
            if not part.size:
                # A single line, unless all are parsed here.
                most = 1 if self._has_ids else min(size - count, _ROWS)
                lines = [self._line(order, size, may_have_weight) for _ in range(most)]
                part = np.array(lines, _fields(order))
            parts.append(part)
            count += part.size
        return np.concatenate(parts)

    def _parse_block(self, order: int, limit: int, may_have_weight: bool) -> _Section:
        """Parses up to `limit` n-grams, and stops at a line of unusual form."""
        from bpd_jax.ngrams.formats import arpa_kernels

        text = self.text
        text.fill()
        limit = min(limit, _ROWS)
        symbols = np.empty((limit, order), np.int32)
        log_probs, log_backoffs = np.empty((2, limit))
        lines = np.empty(limit, np.int64)
        text.at, count, num_lines = arpa_kernels.parse_ngrams(
            text.block,
            text.at,
            may_have_weight,
            symbols,
            log_probs,
            log_backoffs,
            lines,
        )
        section = np.empty(count, _fields(order))
        section["symbols"] = symbols[:count]
        section["log_prob"] = log_probs[:count] * _LOG10
        section["log_backoff"] = log_backoffs[:count] * _LOG10
        section["line"] = lines[:count] + text.number + 1
        text.number += num_lines
        return section

    def _line(self, order: int, size: int, may_have_weight: bool) -> tuple[Any, ...]:
        """Parses the next n-gram, in any valid form; see `_fields`."""
        line = self._next_line()
        fields = _SEPARATOR.split(line)
        if line.startswith(b"\\"):
            self._fail(
                f"{size} {order}-grams were announced, but this line is {_quoted(line)}"
            )
        has_weight = len(fields) == order + 2
        if len(fields) != order + 1 and not has_weight:
            self._fail(f"this is not a {order}-gram: {_quoted(line)}")
        log_prob = self._logarithm(fields[0])
        if log_prob > 0:
            self._fail(f"the log-probability {_quoted(fields[0])} is above 0")
        log_backoff = self._logarithm(fields[-1]) if has_weight else 0.0
        if log_backoff and not may_have_weight:
            self._fail(
                f"the back-off weight {_quoted(fields[-1])} of a {order}-gram, the "
                "highest order, is not 0"
            )
        symbols = [self._symbol(name) for name in fields[1 : order + 1]]
        log_backoff = NEVER if math.isinf(log_backoff) else log_backoff
        return symbols, log_prob, log_backoff, self.text.number

    def _logarithm(self, field: bytes) -> float:
        try:
            value = float(field)
        except ValueError:
            self._fail(f"{_quoted(field)} is not a number")
        if math.isnan(value) or value == math.inf:
            self._fail(f"{_quoted(field)} is not a logarithm of a probability")
        return value * _LOG10

    def _symbol(self, field: bytes) -> int:
        if field in self._names:
            return self._names[field]
        token = parse_id(field) if self._has_ids else -1
        if token < 0:
            kind = "a token id" if self._has_ids else "in the symbol table"
            self._fail(f"{_quoted(field)} is not {kind}")
        return token

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
