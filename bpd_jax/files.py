"""Writing files so that a kill leaves either the old file or the new one; reading JSON.

Folders are written through `bpd_jax.folders`.
"""

import contextlib
import io
import itertools
import json
import math
import os
import pathlib
import stat
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any, BinaryIO

from bpd_jax import buckets, temporaries
from bpd_jax.buckets import BucketPath, as_path
from bpd_jax.errors import UserError

# Parsed, JSON takes up to some thirty times as much memory.
_MOST_JSON, _JSON_PIECE = 1 << 27, 1 << 20  # bytes
MOST_LINE = 1 << 24  # bytes
# What a reader that keeps all lines of a file takes. As an object, each line takes some
# hundred bytes more than its text.
MOST_KEPT, LINE_COST = 1 << 30, 256  # bytes


def check_writable(path: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Tells before long work that its result could not be written.

    Args:
      path: of the result; the folder that it is to lie in is made. Links are followed.
      folder: whether the result is a folder.

    Raises:
      UserError: the path cannot be written, or is a folder where a file is to be, or
        the other way round.
    """
    if not folder and is_stream(path):
        return
    target = resolved(path)
    with telling(path), contextlib.suppress(FileNotFoundError):
        # One look, because another process may be replacing the folder.
        if stat.S_ISDIR(target.stat().st_mode) != folder:
            found, wanted = ("file", "folder") if folder else ("folder", "file")
            raise UserError(f"cannot write {path}: it is a {found}; name a {wanted}.")
    with telling(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(target, BucketPath):
            probe = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
            probe.write_generation(b"")
            probe.unlink(missing_ok=True)
            return
        with tempfile.TemporaryFile(dir=target.parent):
            pass


@contextlib.contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a temporary path that becomes `path` when the block succeeds.

    The temporary file lies in the same folder and is on the disk before one rename
    makes it the result. If the block raises, it is removed and `path` is untouched. A
    link stays, and the file that it names is replaced. A device, a pipe or a socket is
    no file to replace: then `path` itself is yielded, to be written directly. What
    becomes an object under gs:// is written on the local disk and uploaded.

    Raises:
      UserError: the folder cannot be written, or the disk is full.
    """
    if is_stream(path):
        with telling(path):
            yield pathlib.Path(path)
        return
    target = resolved(path)
    if isinstance(target, BucketPath):
        with telling(path):
            staged = buckets.staging(target)
            temporaries.remove_remainders(staged.parent, staged.name)
            with temporaries.part_file(staged) as temporary:
                yield temporary
                buckets.upload(temporary, target)
        return
    with telling(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporaries.remove_remainders(target.parent, target.name)
        with temporaries.part_file(target) as temporary:
            yield temporary
            temporaries.sync(temporary)
            os.replace(temporary, target)
            temporaries.sync_folder(target.parent)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether a path names what is written directly: a device, a pipe, an open file.

    What `/dev/stdout` and `/proc/self/fd/1` name is written directly even where it is
    a regular file: the shell that opened it would not see one put in its place.
    """
    if isinstance(as_path(path), BucketPath):
        return False
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISREG(mode):
        parent = os.path.realpath(os.path.dirname(os.path.abspath(path)))
        return parent == "/dev" or parent.startswith("/proc/")
    return not stat.S_ISDIR(mode)


def resolved(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path that is written: absolute, with all links followed.

    Raises:
      UserError: it has no name, or its links go round in a circle.
    """
    target = as_path(path)
    if not isinstance(target, BucketPath):
        with telling(path):
            target = pathlib.Path(os.path.realpath(path))
            if target.is_symlink():
                raise UserError(f"cannot write {path}: its links go round in a circle.")
    if not target.name or (isinstance(target, BucketPath) and not target.key):
        raise UserError(f"cannot write {path}: give it a name.")
    return target


@contextlib.contextmanager
def telling(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what the system says about writing `path` into a `UserError`."""
    try:
        yield
    except FileExistsError as error:  # Of a file that is to be a folder above.
        raise UserError(
            f"cannot write {path}: {error.filename} is not a folder."
        ) from error
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    except ValueError as error:
        if "null byte" not in str(error):
            raise
        raise UserError(f"cannot write {str(path)!r}: {error}.") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file.

    Raises:
      OSError: it cannot be read.
      ValueError: it is too large, no UTF-8 or no JSON; see `parse_json`.
    """
    # In pieces, because `read(n)` allocates n bytes before it reads.
    with as_path(path).open("rb") as stream:
        pieces = iter(lambda: stream.read(_JSON_PIECE), b"")
        data = b"".join(itertools.islice(pieces, _MOST_JSON // _JSON_PIECE + 1))
    if len(data) > _MOST_JSON:
        raise ValueError(f"it has more than {_MOST_JSON:,} bytes")
    return parse_json(data)


def parse_json(text: str | bytes) -> Any:
    """Parses JSON, in which every number is finite.

    Raises:
      ValueError: it is no UTF-8, no JSON, is nested too deeply, or holds NaN, an
        infinity or a number beyond float64.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value


def bounded_lines(
    stream: BinaryIO | io.BufferedIOBase,
    path: str | os.PathLike[str],
    *,
    kept: bool = False,
) -> Iterator[bytes]:
    """Yields the lines of a file, none of which fills the memory.

    A few megabytes of gzip can unpack to one line, or to many lines, of gigabytes.

    Args:
      stream: the file.
      path: its path, for messages.
      kept: whether the caller keeps what it reads, so that all lines together must fit
        into memory.

    Raises:
      UserError: a line is longer than `MOST_LINE` bytes; or `kept`, and all lines
        together take more than `MOST_KEPT` bytes, `LINE_COST` for each included.
    """
    number, total = 1, 0
    while line := stream.readline(MOST_LINE + 1):
        if len(line) > MOST_LINE:
            raise UserError(
                f"{path}, line {number}, has more than {MOST_LINE:,} bytes: is this a "
                "file of lines?"
            )
        total += len(line) + LINE_COST
        if kept and total > MOST_KEPT:
            raise UserError(
                f"{path} is too large to be kept in memory: its first {number:,} lines "
                f"take more than {MOST_KEPT >> 20} MiB there; split the file."
            )
        yield line
        number += 1
