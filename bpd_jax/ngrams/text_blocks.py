"""Large text files, plain or gzip, in blocks of whole lines."""

import contextlib
import gzip
import math
import pathlib
import zlib
from collections.abc import Generator

import numpy as np

from bpd_jax import progress
from bpd_jax.errors import UserError

_BLOCK = 1 << 24
# A whole corpus may be one line of token ids.
_MOST_LINE = 1 << 28  # bytes
# A line that differs from all others takes about one byte of a gzip file at least: a
# reference to what came before, and a character of its own.
_MOST_PER_BYTE, _FEW_LINES = 2, 1 << 20


class TextBlocks:
    """Reads a file of n-grams for loops that take many lines at once or a single one.

    Attributes:
      block: `[n]` uint8, whole lines of the file.
      at: where in `block` the next line begins.
      number: number of the last line taken, from 1; the caller adds to it and to `at`
        what it takes from `block`.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.block = np.zeros(0, np.uint8)
        self.at = 0
        self.number = 0
        self._bytes = b""
        self._pieces = line_blocks(path, None, distinct=True)

    def close(self) -> None:
        """Closes the file."""
        self._pieces.close()

    def next_line(self) -> bytes | None:
        """Takes one line, without its end; None at the end of the file."""
        if not self.fill():
            return None
        end = self._bytes.index(b"\n", self.at)
        line = self._bytes[self.at : end]
        self.at = end + 1
        self.number += 1
        return line

    def fill(self) -> bool:
        """Reads on if the block is used up; returns whether there is a line."""
        while self.at == self.block.size:
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._bytes = piece
            self.block, self.at = np.frombuffer(piece, np.uint8), 0
        return True


def line_blocks(
    path: pathlib.Path, label: str | None, *, distinct: bool = False
) -> Generator[bytes, None, None]:
    """Yields blocks of whole lines of a plain or gzip file.

    Gzip is recognised by its content. The last line ends with a newline even where the
    file's does not.

    Args:
      path: the file.
      label: name of a progress bar, or None for no bar.
      distinct: whether no line is to occur twice, so that the lines of a gzip file are
        limited by its size; for callers that keep what they read.

    Raises:
      UserError: the file cannot be read, is cut short or damaged, has a line of more
        than 256 MiB, or more lines than can be distinct.
    """
    lines = 0
    begun: list[bytes] = []  # of a line whose end is in a later block
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(open(path, "rb"))
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            most_lines = math.inf
            if distinct and packed:
                most_lines = _FEW_LINES + _MOST_PER_BYTE * path.stat().st_size
            bar = stack.enter_context(
                progress.bar(
                    label=label or "",
                    total=None if packed else path.stat().st_size,
                    unit="B",
                    unit_scale=True,
                    disable=label is None,
                )
            )
            while data := stream.read(_BLOCK):
                bar.update(len(data))
                end = data.rfind(b"\n") + 1
                if end:
                    block = b"".join([*begun, data[:end]])
                    lines += block.count(b"\n")
                    if lines > most_lines:
                        raise UserError(
                            f"{path} holds lines more than once: it unpacks to more "
                            f"than {most_lines:,}, which is more than so small a file "
                            "can hold if all differ."
                        )
                    yield block
                    begun = []
                begun.append(data[end:])
                if len(begun) * _BLOCK > _MOST_LINE:
                    raise UserError(
                        f"{path} has a line of more than {_MOST_LINE:,} bytes "
                        f"after line {lines}: is this a file of lines?"
                    )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path} is cut short or damaged after line {lines}: {error}."
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if any(begun):
        yield b"".join([*begun, b"\n"])
