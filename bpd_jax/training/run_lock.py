"""A run folder belongs to one run at a time."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from bpd_jax.errors import UserError

FILE_NAME = ".lock"


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Keeps others from training in `folder`, which is made if need be.

    The system gives the lock back however the process ends; the empty file stays.
    Where the file system has no locks nothing is kept from anyone.

    Raises:
      UserError: another process holds it, or the folder cannot be written.
    """
    path = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder} is in use: another process is training there; let it end, "
                "or choose another --workdir."
            ) from error
        except OSError:
            pass
        yield
