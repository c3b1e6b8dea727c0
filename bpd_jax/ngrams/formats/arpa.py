"""ARPA files, plain or gzip, as used by SRILM, KenLM and OpenGrm.

    \\data\\
    ngram 1=4
    ...
    \\1-grams:
    -0.30103    a    -0.17609

Logarithms are to base 10 and printed to seven digits. A symbol is a token's id in
decimal unless a table of strings is given; `<s>` and `</s>` are written so. `<s>` is
never predicted: its log-probability is written as -99.
"""

import contextlib
import functools
import gzip
import math
import os
from collections.abc import Iterator, Sequence

import numpy as np

from bpd_jax import files, progress
from bpd_jax.buckets import as_path
from bpd_jax.errors import UserError
from bpd_jax.ngrams import parallel, trie
from bpd_jax.ngrams.formats.arpa_reader import ArpaReader
from bpd_jax.ngrams.formats.symbols import BOUNDARIES, check_symbols
from bpd_jax.ngrams.model import NGramModel

_LOG10 = math.log(10)
_NO_PROBABILITY = -99.0
_ROWS = 1 << 16  # n-grams formatted at once
_SMALLEST = 1e-12  # Smaller numbers are written as 0.
_LEVEL = 6  # of compression


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
      UserError: the symbols do not match the vocabulary, the file cannot be written, or
        a logarithm of the model is NaN.
    """
    path = as_path(path)
    if symbols is None:
        symbols = [str(token) for token in range(model.vocab_size)]
    else:
        check_symbols(model.vocab_size, symbols)
    writer = _Writer(model, symbols, packed=path.suffix == ".gz")
    with files.replacing_file(path) as temporary, open(temporary, "wb") as target:
        for block in writer.blocks():
            target.write(block)


class _Writer:
    """Formats and compresses blocks of n-grams on all cores.

    A compiled loop joins the lines: on one core 4 times as fast as Python, and without
    keeping the other cores waiting for the interpreter lock.

    A compressed file is a sequence of gzip members, one per block, which gzip readers
    decompress to one text.
    """

    def __init__(
        self, model: NGramModel, symbols: Sequence[str], *, packed: bool
    ) -> None:
        self._model = model
        self._packed = packed
        names = [name.encode() for name in (*symbols, *BOUNDARIES)]
        begins = np.cumsum([0, *map(len, names)])
        self._names = np.frombuffer(b"".join(names), np.uint8), begins
        self._longest = max(map(len, names))

    def blocks(self) -> Iterator[bytes]:
        """Yields the file in blocks."""
        sizes = self._model.sizes
        head = [f"ngram {order}={size}" for order, size in enumerate(sizes, start=1)]
        yield self._pack("\n".join(["", "\\data\\", *head, ""]).encode())
        with progress.bar(
            label="write ARPA", total=sum(sizes), unit=" n-grams", unit_scale=True
        ) as bar:
            for order, size in enumerate(sizes, start=1):
                yield self._pack(f"\n\\{order}-grams:\n".encode())
                block = functools.partial(self._block, order, self._is_history(order))
                parts = [
                    slice(begin, min(begin + _ROWS, size))
                    for begin in range(0, size, _ROWS)
                ]
                done = parallel.in_order(block, parts, parallel.cores())
                for part, text in zip(parts, done, strict=True):
                    yield text
                    bar.update(part.stop - part.start)
        yield self._pack(b"\n\\end\\\n")

    def _is_history(self, order: int) -> np.ndarray:
        """Whether each n-gram gets a back-off weight."""
        model = self._model
        if order == model.order:
            return np.zeros(model.keys[-1].size, bool)
        has_children = trie.child_counts(model.keys, order, model.width) > 0
        if order == 1:
            has_children |= model.keys[0] == model.bos
        return has_children

    def _block(self, order: int, is_history: np.ndarray, part: slice) -> bytes:
        from bpd_jax.ngrams.formats import arpa_kernels

        model = self._model
        rows = trie.ngrams(model.keys, order, model.width, part)
        log_probs = model.log_probs[order - 1][part]
        scores = np.where(np.isneginf(log_probs), _NO_PROBABILITY, log_probs / _LOG10)
        if not np.isfinite(scores).all():
            raise UserError(f"a log-probability of the {order}-grams is no number.")
        weights = np.full(len(rows), np.nan)
        if order < model.order:
            chosen = is_history[part]
            weights[chosen] = model.log_backoffs[order - 1][part][chosen]
            if not np.isfinite(weights[chosen]).all():
                raise UserError(f"a back-off weight of the {order}-grams is no number.")
        numbers, backoffs = format_numbers(scores), format_numbers(weights / _LOG10)
        letters = numbers[0].size + backoffs[0].size
        # A line has a name and a blank or tab per symbol, a second tab and its end.
        line = order * (self._longest + 1) + 2
        text = np.empty(letters + len(rows) * line, np.uint8)
        length = arpa_kernels.join_lines(rows, numbers, backoffs, self._names, text)
        assert length >= 0
        return self._pack(text[:length].tobytes())

    def _pack(self, block: bytes) -> bytes:
        # No name and no time in the header: equal models give equal bytes.
        return gzip.compress(block, _LEVEL, mtime=0) if self._packed else block


def format_numbers(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Formats numbers to seven significant digits, as C's `%.7g`.

    Args:
      values: float64, `[n]`; of those that are NaN nothing is written.

    Returns:
      The characters of all of them, uint8, and where each begins, `[n + 1]`.
    """
    present = ~np.isnan(values)
    # Without the sign of a zero.
    shown = np.where(np.abs(values) < _SMALLEST, 0.0, values)[present]
    text = ("%.7g\n" * shown.size) % tuple(shown.tolist())
    letters = np.frombuffer(text.encode("ascii"), np.uint8)
    ends = letters == ord("\n")
    lengths = np.zeros(values.size, np.int64)
    lengths[present] = np.diff(np.flatnonzero(ends), prepend=-1) - 1
    return letters[~ends], np.concatenate([[0], np.cumsum(lengths)])


def read_arpa(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    symbols: Sequence[str] | None = None,
    end_of_text: int | None = None,
    unknown: int | None = None,
) -> NGramModel:
    """Reads a model; errors state the line of the file.

    Files of other programs are interpreted as follows.

    - A missing back-off weight is 1. One of `-inf` is "never", as -99 nats.
    - A log-probability of `-inf` is probability 0; -99 is a number like any other.
      That of `<s>` is ignored.
    - `<unk>` (or `<UNK>`) is the token `unknown`, if one is given. Otherwise n-grams
      with it are dropped and all others keep their scores: the probability of `<unk>`
      is lost, so that the model sums to less than one (see `NGramModel.validate`).
    - If the suffix of an n-gram was pruned (SRILM), it is added with the probability
      that the model backs off to, which changes no score.

    Args:
      path: an ARPA file; gzip is recognised by its content.
      vocab_size: V; by default the length of `symbols`, or else the highest id plus 1.
      symbols: the strings of the tokens 0 ... V-1; by default tokens are decimal ids.
      end_of_text: the model's, see `NGramModel`.
      unknown: the token that `<unk>` stands for, or None.

    Raises:
      UserError: the file is missing, truncated, inconsistent, or contains invalid
        numbers or tokens.
    """
    if symbols is not None:
        check_symbols(len(symbols), symbols)
        vocab_size = len(symbols)
    if unknown is not None and not 0 <= unknown < (vocab_size or unknown + 1):
        raise UserError(
            f"unknown is {unknown}, which is outside the vocabulary 0 ... "
            f"{(vocab_size or 1) - 1}."
        )
    reader = ArpaReader(as_path(path), vocab_size, symbols, unknown)
    with contextlib.closing(reader):
        return reader.read(end_of_text)
