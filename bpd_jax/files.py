"""Writing files and folders so that a kill leaves either the old or the new."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Collection, Iterator

from bpd_jax.errors import UserError


def check_writable(path: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Tells before long work that its result could not be written.

    Args:
      path: of the result; the folder that it is to lie in is made.
      folder: whether the result is a folder.

    Raises:
      UserError: the path cannot be written, or is a folder where a file is to be, or
        the other way round.
    """
    path = pathlib.Path(path)
    if path.exists() and path.is_dir() != folder:
        found, wanted = ("file", "folder") if folder else ("folder", "file")
        raise UserError(f"cannot write {path}: it is a {found}; name a {wanted}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def check_replaceable(path: str | os.PathLike[str], names: Collection[str]) -> None:
    """Tells before a folder is replaced that more than an older result would be lost.

    Args:
      path: of the folder, which may not exist yet.
      names: of all files that an older result may have.

    Raises:
      UserError: it cannot be written, or holds something else.
    """
    check_writable(path, folder=True)
    if pathlib.Path(path).is_dir():
        for found in sorted(os.listdir(path)):
            if found not in names:
                raise UserError(
                    f"{path} is not replaced, because it holds {found}, which is not "
                    "of an earlier result: name a new folder."
                )


@contextlib.contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a temporary path that becomes `path` when the block succeeds.

    The temporary file lies in the same folder, so the last step is one rename.
    If the block raises, the temporary file is removed and `path` is untouched.

    Raises:
      UserError: the folder cannot be written, or the disk is full.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        # Missing, or its folder is: either way there is nothing left to remove.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            temporary.unlink()


@contextlib.contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields an empty temporary folder that becomes `path` when the block succeeds.

    An older folder of that name is replaced as a whole, and only then removed. (Two
    renames: a kill exactly between them leaves the old one beside it as `.NAME.*.old`.)
    If the block raises, the temporary folder is removed and `path` is untouched.

    Raises:
      UserError: the parent folder cannot be written, or the disk is full.
    """
    path = pathlib.Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = pathlib.Path(
            tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        )
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        yield temporary
        # mkdtemp makes a private folder; the result gets the usual permissions.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        if path.exists():
            old = temporary.with_suffix(".old")
            os.replace(path, old)
            try:
                os.replace(temporary, path)
            except OSError:
                os.replace(old, path)
                raise
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
