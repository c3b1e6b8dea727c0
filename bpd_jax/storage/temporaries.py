"""Temporary files and folders, which are renamed to the result when complete.

They are beside the result and are called `.bpd_jax-NAME.RANDOM.part`. A process that is
killed leaves its own; `make clean` removes them.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator

PREFIX, SUFFIX = ".bpd_jax-", ".part"


@contextlib.contextmanager
def part(path: pathlib.Path, *, folder: bool = False) -> Iterator[pathlib.Path]:
    """Yields a new empty file or folder beside `path`; removes it in the end.

    Its name cannot be predicted and an existing file is never opened, so a planted link
    is not followed. It has the permissions of `path`, if that exists.
    """
    name = f"{PREFIX}{path.name[:200]}.{secrets.token_hex(8)}{SUFFIX}"
    temporary = path.with_name(name)
    if folder:
        temporary.mkdir()
    else:
        temporary.touch(exist_ok=False)
    try:
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o777 | (0o700 if folder else 0o600))
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        # The folder that held it may be gone, too.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            temporary.unlink()


def is_temporary(name: str) -> bool:
    """Whether this is the name of a temporary file or folder of this module."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def sync(path: pathlib.Path, *, contents: bool = True) -> None:
    """Waits until a file, or a folder with its contents, is on the disk."""
    folder = path.is_dir()
    for entry in path.iterdir() if folder and contents else ():
        sync(entry)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not folder:  # Some file systems cannot sync folders.
            raise
    finally:
        os.close(descriptor)
