"""Reads large text files, plain or gzip, in blocks of complete lines."""

import contextlib
import gzip
import pathlib
import zlib
from collections.abc import Generator

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.storage.paths import local_copy

_BLOCK = 1 << 24  # bytes
# Maximum bytes of a line: a complete corpus may be one line of token ids.
_MAX_LINE = 1 << 28


class TextBlocks:
    """Reads a file of n-grams by blocks or by single lines.

    Attributes:
      block: `[n]` uint8, complete lines of the file.
      at: index in `block` of the next line. A caller that parses lines of `block`
        advances `at` and `number`.
      number: number of the last line that was read, from 1.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.block = np.zeros(0, np.uint8)
        self.at = 0
        self.number = 0
        self._bytes = b""
        self._pieces = line_blocks(path, None)

    def close(self) -> None:
        """Closes the file."""
        self._pieces.close()

    def next_line(self) -> bytes | None:
        """Returns the next line without its newline; None at the end of the file."""
        if not self.fill():
            return None
        end = self._bytes.index(b"\n", self.at)
        line = self._bytes[self.at : end]
        self.at = end + 1
        self.number += 1
        return line

    def fill(self) -> bool:
        """Reads the next block if `block` is used up; returns False at the end."""
        while self.at == self.block.size:
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._bytes = piece
            self.block, self.at = np.frombuffer(piece, np.uint8), 0
        return True


def line_blocks(path: pathlib.Path, label: str | None) -> Generator[bytes, None, None]:
    """Yields blocks of complete lines of a plain or gzip file.

    Gzip is recognised by its content. A newline is added to the last line if it lacks
    one.

    Args:
      label: name of a progress bar, or None for no bar.
    """
    lines = 0
    unfinished: list[bytes] = []  # Parts of a line that ends in a later block.
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(open(local_copy(path), "rb"))
            compressed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream = gzip.GzipFile(fileobj=raw) if compressed else raw
            bar = stack.enter_context(
                progress.bar(
                    label=label or "",
                    total=None if compressed else path.stat().st_size,
                    unit="B",
                    unit_scale=True,
                    disable=label is None,
                )
            )
            while data := stream.read(_BLOCK):
                bar.update(len(data))
                end = data.rfind(b"\n") + 1
                if end:
                    block = b"".join([*unfinished, data[:end]])
                    lines += block.count(b"\n")
                    yield block
                    unfinished = []
                unfinished.append(data[end:])
                if len(unfinished) * _BLOCK > _MAX_LINE:
                    raise UserError(
                        f"{path} has a line of more than {_MAX_LINE:,} bytes after "
                        f"line {lines}: is it a text file?"
                    )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path} is truncated or damaged after line {lines}: {error}."
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if any(unfinished):
        yield b"".join([*unfinished, b"\n"])
