"""Temporary files and folders beside a result, which one rename turns into it.

They are called `.NAME.HOST.RANDOM.part`. The process that writes one holds a lock on
it, which the system releases however the process ends. So what a killed process left
can be distinguished from what another one is writing, and the next writer of NAME
removes it.
"""

import contextlib
import fcntl
import os
import pathlib
import platform
import shutil
import tempfile
import zlib
from collections.abc import Iterator

SUFFIX = ".part"
# What a folder is called between the two renames that replace it.
OLD_SUFFIX = ".old"
# A lock may be known on one machine only, so each removes what was left on it.
_HOST = f"{zlib.crc32(platform.node().encode()):08x}"


@contextlib.contextmanager
def part_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new empty file beside `path` that is removed at the end if still there.

    Its name cannot be predicted and the file is created anew, so no link that
    somebody planted is followed.

    Raises:
      OSError: the folder cannot be written.
    """
    while True:
        descriptor, name = tempfile.mkstemp(
            prefix=f".{path.name}.{_HOST}.", suffix=SUFFIX, dir=path.parent
        )
        if _locked(descriptor, pathlib.Path(name)):
            break
        os.close(descriptor)
    temporary = pathlib.Path(name)
    try:
        temporary.chmod(_mode(path, 0o666) | 0o600)
        yield temporary
    finally:
        # Missing, or its folder is: either way there is nothing left to remove.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            temporary.unlink()
        os.close(descriptor)


@contextlib.contextmanager
def part_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new empty folder beside `path`, removed at the end if still there.

    Raises:
      OSError: the parent folder cannot be written.
    """
    while True:
        name = tempfile.mkdtemp(
            prefix=f".{path.name}.{_HOST}.", suffix=SUFFIX, dir=path.parent
        )
        temporary = pathlib.Path(name)
        try:
            descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # Another process took it for a remainder.
            continue
        if _locked(descriptor, temporary):
            break
        os.close(descriptor)
    try:
        temporary.chmod(_mode(path, 0o777) | 0o700)
        yield temporary
    finally:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
        finally:
            os.close(descriptor)


def remove_remainders(parent: pathlib.Path, name: str | None = None) -> None:
    """Removes what dead processes of this machine left while they wrote.

    A folder that a process was killed while replacing, between its two renames, gets
    its name back.

    Args:
      parent: the folder of the results.
      name: of one result; None for all in the folder.
    """
    middle = f".{_HOST}."
    try:
        entries = [entry for entry in os.listdir(parent) if middle in entry]
    except OSError:
        return
    for entry in entries:
        result, _, rest = entry[1:].rpartition(middle)
        if not entry.startswith(".") or name not in (None, result) or not result:
            continue
        path = parent / entry
        if rest.endswith(SUFFIX):
            _remove_if_dead(path)
        elif rest.endswith(OLD_SUFFIX):
            with exclusive(parent), contextlib.suppress(OSError):
                if os.path.lexists(parent / result):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.rename(path, parent / result)


def is_temporary(name: str) -> bool:
    """Whether a file of this name is one of ours, finished by nobody yet."""
    return name.startswith(".") and name.endswith(SUFFIX)


@contextlib.contextmanager
def exclusive(folder: pathlib.Path) -> Iterator[None]:
    """Lets one process at a time rename things in a folder, where locks are known.

    Raises:
      OSError: there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or a folder and all in it, is on the disk.

    Raises:
      OSError: it could not be written, for example because the disk is full.
    """
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            sync(entry)
        sync_folder(path)
    elif path.is_file() and not path.is_symlink():
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_folder(folder: pathlib.Path) -> None:
    """Waits until the names in a folder are on the disk, where that can be asked."""
    with contextlib.suppress(OSError):  # Some file systems know no such thing.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _locked(descriptor: int, path: pathlib.Path) -> bool:
    """Locks what was just made; False if somebody removed it before that."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # A file system without locks: nobody removes anything there.
    return _is_at(descriptor, path)


def _remove_if_dead(path: pathlib.Path) -> None:
    """Removes a temporary file or folder unless its writer lives."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(descriptor, path):
            return
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    try:
        there = os.lstat(path)
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _mode(path: pathlib.Path, default: int) -> int:
    """The permissions of what is replaced, or those that a new one gets."""
    try:
        return os.stat(path).st_mode & 0o777
    except OSError:
        umask = os.umask(0)
        os.umask(umask)
        return default & ~umask
