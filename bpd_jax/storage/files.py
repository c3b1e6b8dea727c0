"""Atomic writing of files; reading of small files, such as JSON."""

import contextlib
import json
import lzma
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import parse_json
from bpd_jax.storage import paths
from bpd_jax.storage.paths import as_path, local_copy, part, sync

# Parsed JSON takes up to thirty times as much memory as its text.
MOST_BYTES = 1 << 27


def check_writable(path: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Checks that a result can be written, before the long work that computes it.

    Its parent folder is created.
    """
    if not folder and is_stream(path):
        return
    target = resolved(path)
    with os_errors_as_user_errors(path):
        if target.exists() and target.is_dir() != folder:
            actual, wanted = ("file", "folder") if folder else ("folder", "file")
            raise UserError(f"cannot write {path}: it is a {actual}; name a {wanted}.")
        if paths.in_bucket(target):
            probe = paths.beside(target)  # Other processes of the run do the same.
            probe.write_bytes(b"")
            probe.unlink()
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass


@contextlib.contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a temporary path that becomes `path` when the block succeeds.

    If the block raises or the process is killed, `path` is unchanged. A link stays, and
    its target is replaced. Of a device, pipe or socket `path` itself is yielded, to be
    written directly. A file under gs:// is written on the local disk and uploaded.
    """
    with os_errors_as_user_errors(path):
        if is_stream(path):
            yield pathlib.Path(path)
            return
        target = resolved(path)
        local = paths.work_place(target)
        local.parent.mkdir(parents=True, exist_ok=True)
        with part(local) as temporary:
            yield temporary
            if paths.in_bucket(target):
                paths.upload(temporary, target)
            else:
                sync(temporary)
                os.replace(temporary, target)
                sync(target.parent, contents=False)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file atomically, in UTF-8; see `replacing_file`."""
    with replacing_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | os.PathLike[str], value: object, **layout: Any) -> None:
    """Writes a JSON file atomically; see `json.dumps` for its layout."""
    write_text(path, json.dumps(value, **{"indent": 2, **layout}) + "\n")


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether a path is written directly: a device, a pipe or an open file.

    `/dev/stdout` and `/proc/self/fd/1` are written directly even if they are regular
    files, because the shell that opened the file would not see its replacement.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISREG(mode):
        parent = os.path.realpath(os.path.dirname(os.path.abspath(path)))
        return parent == "/dev" or parent.startswith("/proc/")
    return not stat.S_ISDIR(mode)


def resolved(path: str | os.PathLike[str]) -> pathlib.Path:
    """The absolute path that is written, with all links followed."""
    target = as_path(path)
    if not paths.in_bucket(target):
        with os_errors_as_user_errors(path):
            target = pathlib.Path(os.path.realpath(path))
            if target.is_symlink():
                raise UserError(f"cannot write {path}: its symbolic links form a loop.")
    # A bucket has three parts: /, gs and its name.
    if not target.name or (paths.in_bucket(target) and len(target.parts) < 4):
        raise UserError(f"cannot write {path}: give it a name.")
    return target


@contextlib.contextmanager
def os_errors_as_user_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns errors of the system about writing `path` into a `UserError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        if isinstance(error, FileExistsError):  # A parent of `path` is a file.
            reason = f"{error.filename} is not a folder"
        raise UserError(f"cannot write {path}: {reason}.") from error
    except ValueError as error:
        if "null byte" not in str(error):
            raise
        raise UserError(f"cannot write {str(path)!r}: {error}.") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file; see `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path))


def read_bytes(path: str | os.PathLike[str], most: int | None = MOST_BYTES) -> bytes:
    """Reads a whole file; by default a small one, such as a description.

    If it has more than `most` bytes, this is a `ValueError`. None is the size that a
    regular file has when it is opened. Of a device or pipe, which may have no end, no
    more than 128 MiB are read.
    """
    with as_path(path).open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        most = size if most is None else most
        if not size:  # A device, a pipe or a file of /proc.
            most = min(most or MOST_BYTES, MOST_BYTES)
        data = b"" if size > most else stream.read((size or most) + 1)
    if max(size, len(data)) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def read_xz(path: str | os.PathLike[str]) -> bytes:
    """Reads a file compressed by xz; a `ValueError` if it is damaged or large."""
    try:
        with lzma.open(local_copy(path)) as stream:
            data = stream.read(MOST_BYTES + 1)
    except (EOFError, lzma.LZMAError) as error:
        raise ValueError(str(error)) from error
    # A few bytes could fill the memory.
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return data


def write_npz(path: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
    """Writes arrays, numbers or strings as an uncompressed .npz file, atomically."""
    with replacing_file(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)
