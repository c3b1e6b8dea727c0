"""Atomic writing of files; reading of JSON and of lines, with limits.

Folders are written through `bpd_jax.storage.folders`.
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

from bpd_jax.base.errors import UserError
from bpd_jax.storage import buckets, temporaries
from bpd_jax.storage.buckets import BucketPath, as_path

# Parsed JSON takes up to thirty times as much memory as its text.
_MOST_BYTES, _PIECE = 1 << 27, 1 << 20  # bytes
MOST_LINE = 1 << 24  # bytes
# Limit of a reader that keeps all lines of a file. As a Python object, each line takes
# some hundred bytes more than its text.
MOST_KEPT, LINE_COST = 1 << 30, 256  # bytes


def check_writable(path: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Checks that a result can be written, before the long work that computes it.

    Args:
      path: path of the result; its parent folder is created. Links are followed.
      folder: whether the result is a folder.

    Raises:
      UserError: the path cannot be written, or is a folder and the result a file, or
        the other way round.
    """
    if not folder and is_stream(path):
        return
    target = resolved(path)
    with os_errors_as_user_errors(path), contextlib.suppress(FileNotFoundError):
        # A single call, because another process may be replacing the folder.
        if stat.S_ISDIR(target.stat().st_mode) != folder:
            actual, wanted = ("file", "folder") if folder else ("folder", "file")
            raise UserError(f"cannot write {path}: it is a {actual}; name a {wanted}.")
    with os_errors_as_user_errors(path):
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

    The temporary file is in the same folder and is synced to disk before it is renamed,
    so a kill leaves either the old file or the new one. If the block raises, it is
    removed and `path` is unchanged. A link stays, and its target is replaced. A device,
    pipe or socket is not replaced: `path` itself is yielded, to be written directly. A
    file under gs:// is written on the local disk and uploaded.

    Raises:
      UserError: the folder cannot be written, or the disk is full.
    """
    if is_stream(path):
        with os_errors_as_user_errors(path):
            yield pathlib.Path(path)
        return
    target = resolved(path)
    with os_errors_as_user_errors(path):
        local = buckets.on_disk(target)
        local.parent.mkdir(parents=True, exist_ok=True)
        temporaries.remove_remainders(local.parent, local.name)
        with temporaries.part(local) as temporary:
            yield temporary
            if isinstance(target, BucketPath):
                buckets.upload(temporary, target)
            else:
                temporaries.sync(temporary)
                os.replace(temporary, target)
                temporaries.sync_folder(target.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file atomically, in UTF-8; see `replacing_file`."""
    with replacing_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(
    path: str | os.PathLike[str],
    value: object,
    *,
    indent: int = 2,
    ensure_ascii: bool = True,
) -> None:
    """Writes a JSON file atomically; see `replacing_file` and `json.dumps`."""
    text = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
    write_text(path, text + "\n")


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether a path is written directly: a device, a pipe or an open file.

    `/dev/stdout` and `/proc/self/fd/1` are written directly even if they are regular
    files, because the shell that opened the file would not see its replacement.
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
    """The absolute path that is written, with all links followed.

    Raises:
      UserError: the path has no name, or its symbolic links form a loop.
    """
    target = as_path(path)
    if not isinstance(target, BucketPath):
        with os_errors_as_user_errors(path):
            target = pathlib.Path(os.path.realpath(path))
            if target.is_symlink():
                raise UserError(f"cannot write {path}: its symbolic links form a loop.")
    if not target.name or (isinstance(target, BucketPath) and not target.key):
        raise UserError(f"cannot write {path}: give it a name.")
    return target


@contextlib.contextmanager
def os_errors_as_user_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns errors of the system about writing `path` into a `UserError`."""
    try:
        yield
    except FileExistsError as error:  # A parent of `path` is a file.
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
      ValueError: it is too large, not UTF-8 or not JSON; see `parse_json`.
    """
    return parse_json(read_bytes(path))


def read_bytes(path: str | os.PathLike[str], most: int | None = _MOST_BYTES) -> bytes:
    """Reads a whole file; by default a small one, such as a description.

    Args:
      path: the file.
      most: maximum number of bytes; None for the size that a regular file has when it
        is opened. Of a device or pipe, which may have no end, no more than 128 MiB are
        read.

    Raises:
      OSError: it cannot be read.
      ValueError: it has more bytes.
    """
    with as_path(path).open("rb") as stream:
        status = os.fstat(stream.fileno())
        # Files of /proc are regular, but their size is 0.
        if stat.S_ISREG(status.st_mode) and status.st_size:
            if most is not None and status.st_size > most:
                raise ValueError(f"it has more than {most:,} bytes")
            return stream.read(status.st_size)
        most = _MOST_BYTES if most is None else min(most, _MOST_BYTES)
        # In pieces, because `read(n)` allocates n bytes before it reads.
        pieces = iter(lambda: stream.read(_PIECE), b"")
        data = b"".join(itertools.islice(pieces, most // _PIECE + 1))
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def parse_json(text: str | bytes) -> Any:
    """Parses JSON whose numbers are all finite.

    Raises:
      ValueError: it is not UTF-8, not JSON, nested too deeply, or contains NaN, an
        infinity or a number beyond float64.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(
            text, parse_constant=_refuse, parse_float=_finite, parse_int=_bounded
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _bounded(text: str) -> int:
    # The largest float64 has 309 digits; `float` of a longer integer would overflow.
    if len(text) > 308:
        raise ValueError(f"{text[:40]}… is beyond the range of numbers")
    return int(text)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def bounded_lines(
    stream: BinaryIO | io.BufferedIOBase,
    path: str | os.PathLike[str],
    *,
    kept: bool = False,
) -> Iterator[bytes]:
    """Yields the lines of a file, with limits so that they cannot fill the memory.

    A few megabytes of gzip can unpack to gigabytes, in one line or in many.

    Args:
      stream: the file.
      path: its path, for messages.
      kept: whether the caller keeps all lines, so that together they must fit into
        memory.

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
