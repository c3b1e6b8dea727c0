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
from collections.abc import Callable, Iterator, Sequence

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
      symbols: names of the V tokens; None writes ids.
    """
    if symbols is None:
        symbols = [str(token) for token in range(model.vocab_size)]
    else:
        check_symbols(model.vocab_size, symbols)
    names = [name.encode() for name in (*symbols, *BOUNDARIES)]
    compressed = as_path(path).suffix == ".gz"
    with files.replacing_file(path) as temporary, open(temporary, "wb") as target:
        for block in _blocks(model, names, compressed):
            target.write(block)


def _blocks(
    model: NGramModel, names: Sequence[bytes], compressed: bool
) -> Iterator[bytes]:
    """Formats and compresses blocks of n-grams on all cores.

    A compressed file is a sequence of gzip members, one per block, which gzip readers
    decompress to one text.
    """

    def as_stored(text: bytes) -> bytes:
        # Without a name and a time in the header, equal models give equal bytes.
        return gzip.compress(text, _COMPRESSION_LEVEL, mtime=0) if compressed else text

    sizes = model.sizes
    head = [f"ngram {order}={size}" for order, size in enumerate(sizes, start=1)]
    yield as_stored("\n".join(["", "\\data\\", *head, ""]).encode())
    ends = np.cumsum([0, *map(len, names)])
    words = np.frombuffer(b"".join(names), np.uint8), ends
    with progress.bar(
        label="write ARPA", total=sum(sizes), unit=" n-grams", unit_scale=True
    ) as bar:
        for order, size in enumerate(sizes, start=1):
            yield as_stored(f"\n\\{order}-grams:\n".encode())
            begins = range(0, size, _ROWS)
            parts = [slice(begin, min(begin + _ROWS, size)) for begin in begins]
            lines = functools.partial(
                _lines, model, order, model.is_history(order), words, as_stored
            )
            blocks = parallel.in_order(lines, parts, parallel.cores())
            for part, text in zip(parts, blocks, strict=True):
                yield text
                bar.update(part.stop - part.start)
    yield as_stored(b"\n\\end\\\n")


def _lines(
    model: NGramModel,
    order: int,
    is_history: np.ndarray,
    names: tuple[np.ndarray, np.ndarray],
    as_stored: Callable[[bytes], bytes],
    part: slice,
) -> bytes:
    """The lines of some n-grams.

    A compiled loop joins them: on one core it is 4 times as fast as Python, and it does
    not hold the interpreter lock.
    """
    from bpd_jax.ngrams.formats import arpa_kernels

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
            raise UserError(f"a back-off weight of the {order}-grams is not finite.")
    numbers, backoffs = format_numbers(scores), format_numbers(weights / _LOG10)
    letters = numbers[0].size + backoffs[0].size
    # In addition to numbers, a line has a name and a separator per symbol, at most one
    # more tab, and a newline.
    line = order * (int(np.diff(names[1]).max()) + 1) + 2
    text = np.empty(letters + len(symbols) * line, np.uint8)
    length = arpa_kernels.join_lines(symbols, numbers, backoffs, names, text)
    return as_stored(text[:length].tobytes())


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
