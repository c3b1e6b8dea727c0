"""Lines of plain or gzip files, with their numbers."""

import gzip
import pathlib
import zlib
from collections.abc import Generator

from bpd_jax import files
from bpd_jax.errors import UserError


def numbered_lines(path: pathlib.Path) -> Generator[tuple[int, bytes], None, None]:
    """Yields (line number from 1, line with its ending).

    Gzip is recognised by its content, whatever the file is called.

    Raises:
      UserError: the file cannot be read, or its compressed data are cut short or
        damaged.
    """
    number = 0
    try:
        with open(path, "rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            lines = files.bounded_lines(stream, path)
            for number, line in enumerate(lines, start=1):
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path} is cut short or damaged after line {number}: {error}."
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
