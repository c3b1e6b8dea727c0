"""Temporary files and folders, which are renamed to the result when complete.

They are in the same folder as the result and are called `.NAME.HOST.RANDOM.part`. The
process that writes one holds a lock on it, which the system releases when the process
ends in any way. The lock distinguishes what a killed process left, which the next
writer of NAME removes, from what another process is writing.
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
# Suffix of a folder between the two renames that replace it.
OLD_SUFFIX = ".old"
# Locks may be local to a machine, so each machine removes only its own leftovers.
_HOST = f"{zlib.crc32(platform.node().encode()):08x}"


@contextlib.contextmanager
def part(path: pathlib.Path, *, folder: bool = False) -> Iterator[pathlib.Path]:
    """Yields a new empty file or folder beside `path`; removes it in the end.

    Its name cannot be predicted and an existing file is never opened, so a planted link
    is not followed.

    Raises:
      OSError: the folder that holds `path` cannot be written.
    """
    names = (SUFFIX, f".{path.name}.{_HOST}.", path.parent)
    while True:
        if folder:
            temporary = pathlib.Path(tempfile.mkdtemp(*names))
            try:
                descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # Another process took it for a remainder.
                continue
        else:
            descriptor, name = tempfile.mkstemp(*names)
            temporary = pathlib.Path(name)
        if _locked(descriptor, temporary):
            break
        os.close(descriptor)
    default, least = (0o777, 0o700) if folder else (0o666, 0o600)
    try:
        temporary.chmod(_mode(path, default) | least)
        yield temporary
    finally:
        try:
            _remove(temporary)
        finally:
            os.close(descriptor)


def remove_remainders(parent: pathlib.Path, name: str | None = None) -> None:
    """Removes temporary files of processes of this machine that have ended.

    If a process was killed between the two renames that replace a folder, the older
    folder gets its name back.

    Args:
      parent: the folder of the results.
      name: name of one result; None for all in the folder.
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
    """Whether this is the name of a temporary file or folder of this module."""
    return name.startswith(".") and name.endswith(SUFFIX)


@contextlib.contextmanager
def exclusive(folder: pathlib.Path) -> Iterator[None]:
    """Lets one process at a time rename entries of a folder, if locks are supported.

    Raises:
      OSError: the folder does not exist.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or a folder with everything in it, is on the disk.

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
    """Waits until the names in a folder are on the disk, if the system supports it."""
    with contextlib.suppress(OSError):  # Some file systems cannot sync folders.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _locked(descriptor: int, path: pathlib.Path) -> bool:
    """Locks a file or folder just created; False if it was removed before that."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # Without locks, nothing is removed by other processes.
    return _is_at(descriptor, path)


def _remove_if_dead(path: pathlib.Path) -> None:
    """Removes a temporary file or folder unless its writer is still running."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(descriptor, path):
            return
        _remove(path)
    except OSError:
        return
    finally:
        os.close(descriptor)


def _remove(path: pathlib.Path) -> None:
    """Removes a file or folder, if it is still there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        # The folder that held it may be gone, too.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    try:
        there = os.lstat(path)
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _mode(path: pathlib.Path, default: int) -> int:
    """The permissions of an existing file or folder, or those of a new one."""
    try:
        return os.stat(path).st_mode & 0o777
    except OSError:
        umask = os.umask(0)
        os.umask(umask)
        return default & ~umask
