"""ARPA files, plain or gzip, as used by SRILM, KenLM and OpenGrm.

    \\data\\
    ngram 1=4
    ...
    \\1-grams:
    -0.30103    a    -0.17609

Logarithms are to base 10 and printed to seven digits. A symbol is `<s>`, `</s>`, or a
token: its decimal id, or its name (`formats.symbols`). `<s>` is never predicted: its
log-probability is written as -99.
"""

import functools
import gzip
import math
import os
from collections.abc import Iterator, Sequence

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import parallel, trie
from bpd_jax.ngrams.formats.symbols import BOUNDARIES, check_symbols
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path

_LOG10 = math.log(10)
_NO_PROBABILITY = -99.0
_ROWS = 1 << 16  # Number of n-grams formatted at once.
_SMALLEST = 1e-12  # Smaller absolute values are written as 0.
_COMPRESSION_LEVEL = 6


def write_arpa(
    model: NGramModel,
    path: str | os.PathLike[str],
    symbols: Sequence[str] | None = None,
) -> None:
    """Writes a model; a path that ends in `.gz` is compressed.

    Equal models give equal bytes.

    Args:
      model: the model.
      path: the file.
      symbols: names of the V tokens; None writes ids.
    """
    if symbols is None:
        symbols = [str(token) for token in range(model.vocab_size)]
    else:
        check_symbols(model.vocab_size, symbols)
    writer = _Writer(model, symbols, compressed=as_path(path).suffix == ".gz")
    with files.replacing_file(path) as temporary, open(temporary, "wb") as target:
        for block in writer.blocks():
            target.write(block)


class _Writer:
    """Formats and compresses blocks of n-grams on all cores.

    A compiled loop joins the lines: on one core it is 4 times as fast as Python, and it
    does not hold the interpreter lock.

    A compressed file is a sequence of gzip members, one per block, which gzip readers
    decompress to one text.
    """

    def __init__(
        self, model: NGramModel, symbols: Sequence[str], *, compressed: bool
    ) -> None:
        self._model = model
        self._compressed = compressed
        names = [name.encode() for name in (*symbols, *BOUNDARIES)]
        begins = np.cumsum([0, *map(len, names)])
        self._names = np.frombuffer(b"".join(names), np.uint8), begins
        self._longest = max(map(len, names))

    def blocks(self) -> Iterator[bytes]:
        """Yields the file in blocks."""
        sizes = self._model.sizes
        head = [f"ngram {order}={size}" for order, size in enumerate(sizes, start=1)]
        yield self._compress("\n".join(["", "\\data\\", *head, ""]).encode())
        with progress.bar(
            label="write ARPA", total=sum(sizes), unit=" n-grams", unit_scale=True
        ) as bar:
            for order, size in enumerate(sizes, start=1):
                yield self._compress(f"\n\\{order}-grams:\n".encode())
                block = functools.partial(self._block, order, self._is_history(order))
                parts = [
                    slice(begin, min(begin + _ROWS, size))
                    for begin in range(0, size, _ROWS)
                ]
                blocks = parallel.in_order(block, parts, parallel.cores())
                for part, text in zip(parts, blocks, strict=True):
                    yield text
                    bar.update(part.stop - part.start)
        yield self._compress(b"\n\\end\\\n")

    def _is_history(self, order: int) -> np.ndarray:
        """Whether each n-gram of an order has a back-off weight, `[n]` bool."""
        model = self._model
        if order == model.order:
            return np.zeros(model.keys[-1].size, bool)
        is_history = trie.child_counts(model.keys, order, model.width) > 0
        # Models of other programs may have weights of n-grams without extensions.
        is_history |= model.log_backoffs[order - 1] != 0
        if order == 1:
            is_history |= model.keys[0] == model.bos
        return is_history

    def _block(self, order: int, is_history: np.ndarray, part: slice) -> bytes:
        from bpd_jax.ngrams.formats import arpa_kernels

        model = self._model
        symbols = trie.ngrams(model.keys, order, model.width, part)
        log_probs = model.log_probs[order - 1][part]
        scores = np.where(np.isneginf(log_probs), _NO_PROBABILITY, log_probs / _LOG10)
        if not np.isfinite(scores).all():
            raise UserError(f"a log-probability of the {order}-grams is not finite.")
        weights = np.full(len(symbols), np.nan)
        if order < model.order:
            in_part = is_history[part]
            weights[in_part] = model.log_backoffs[order - 1][part][in_part]
            if not np.isfinite(weights[in_part]).all():
                raise UserError(
                    f"a back-off weight of the {order}-grams is not finite."
                )
        numbers, backoffs = format_numbers(scores), format_numbers(weights / _LOG10)
        letters = numbers[0].size + backoffs[0].size
        # In addition to numbers, a line has a name and a separator per symbol, at most
        # one more tab, and a newline.
        line = order * (self._longest + 1) + 2
        text = np.empty(letters + len(symbols) * line, np.uint8)
        length = arpa_kernels.join_lines(symbols, numbers, backoffs, self._names, text)
        return self._compress(text[:length].tobytes())

    def _compress(self, block: bytes) -> bytes:
        if not self._compressed:
            return block
        # Without a name and a time in the header, equal models give equal bytes.
        return gzip.compress(block, _COMPRESSION_LEVEL, mtime=0)


def format_numbers(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Formats numbers to seven significant digits, as C's `%.7g`.

    Args:
      values: float64, `[n]`; NaN becomes an empty text.

    Returns:
      The concatenated characters, uint8, and the offset of each number, `[n + 1]`.
    """
    present = ~np.isnan(values)
    # This also removes the sign of a zero.
    rounded = np.where(np.abs(values) < _SMALLEST, 0.0, values)[present]
    text = ("%.7g\n" * rounded.size) % tuple(rounded.tolist())
    letters = np.frombuffer(text.encode("ascii"), np.uint8)
    ends = letters == ord("\n")
    lengths = np.zeros(values.size, np.int64)
    lengths[present] = np.diff(np.flatnonzero(ends), prepend=-1) - 1
    return letters[~ends], np.concatenate([[0], np.cumsum(lengths)])
