"""Atomic writing of folders, which replaces only folders of the same kind.

Every command that writes a folder describes it by a `FolderKind`. An existing folder is
written only if it is empty or of that kind. This is checked before the command begins
its work, and again before it replaces the folder.
"""

import contextlib
import dataclasses
import fnmatch
import os
import pathlib
from collections.abc import Iterator

from bpd_jax.base.errors import UserError
from bpd_jax.storage import files, paths, temporaries

# `FolderKind.text` is searched in this many bytes of the marker.
_HEADER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class FolderKind:
    """How the folders of one writer are recognized.

    Attributes:
      title: name of the kind for messages, such as "an n-gram model".
      marker: name of a file that every folder of the kind contains.
      names: patterns (`fnmatch`) of the other names that it may contain. A folder with
        any other file is not replaced.
      text: text that the marker contains, if its name does not identify the kind.
      in_place: whether the writer only adds files and never replaces the folder, which
        may then contain other files.
    """

    title: str
    marker: str
    names: tuple[str, ...] = ()
    text: str = ""
    in_place: bool = False

    def foreign(self, folder: pathlib.Path) -> str | None:
        """Returns why a folder is not of this kind; None if it is, or is empty."""
        entries = sorted(path.name for path in folder.iterdir())
        entries = [name for name in entries if not temporaries.is_temporary(name)]
        if not entries:
            return None
        patterns = (self.marker, *self.names)
        for name in () if self.in_place else entries:
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                return f"it holds {name}, which is not part of {self.title}"
        marker = folder / self.marker
        if not marker.is_file():
            return f"it is not {self.title}: it has no file {self.marker}"
        if self.text:
            with marker.open("rb") as stream:
                if self.text.encode() not in stream.read(_HEADER_BYTES):
                    return f"its {self.marker} is not that of {self.title}"
        return None


def check_folder(path: str | os.PathLike[str], kind: FolderKind) -> None:
    """Checks that a folder can be written: it is new, empty or of this kind."""
    files.check_writable(path, folder=True)
    target = files.resolved(path)
    with files.os_errors_as_user_errors(path):
        if not target.exists():
            return
        reason = kind.foreign(target)
    if not kind.in_place and pathlib.Path.cwd().is_relative_to(target):
        reason = "it is the current folder or above it"
    if reason is not None:
        raise UserError(
            f"{path} is not written to: {reason}. Name a new folder, or move what is "
            "there away."
        )


@contextlib.contextmanager
def replacing_folder(
    path: str | os.PathLike[str], kind: FolderKind
) -> Iterator[pathlib.Path]:
    """Yields an empty temporary folder that becomes `path` when the block succeeds.

    An older folder of the same kind is replaced as a whole and removed afterwards. If
    the block raises, the temporary folder is removed and `path` is unchanged. A link
    stays, and its target is replaced.

    A folder under gs:// is written on the local disk and uploaded. During the upload,
    and after one that was interrupted, readers refuse the folder.
    """
    check_folder(path, kind)
    target = files.resolved(path)
    with files.os_errors_as_user_errors(path):
        local = paths.work_place(target)
        with temporaries.part(local, folder=True) as temporary:
            yield temporary
            # Something else may have been written there meanwhile.
            check_folder(path, kind)
            if paths.in_bucket(target):
                paths.upload_folder(temporary, target, kind.marker)
                return
            temporaries.sync(temporary)
            _swap(temporary, target)
            temporaries.sync(target.parent, contents=False)


def remove_folder(path: str | os.PathLike[str], kind: FolderKind) -> None:
    """Removes a folder of this kind, if it exists.

    It is renamed first, so that nobody finds a part of it under its name.
    """
    target = files.resolved(path)
    if not target.exists():
        return
    check_folder(path, kind)
    with files.os_errors_as_user_errors(path):
        if paths.in_bucket(target):
            for name in (kind.marker, *paths.objects(target)):
                (target / name).unlink(missing_ok=True)
            return
        with temporaries.part(target, folder=True) as temporary:
            os.rename(target, temporary / target.name)


def _swap(new: pathlib.Path, path: pathlib.Path) -> None:
    """Renames `new` to `path`, and removes an older folder there."""
    if not path.exists():
        os.rename(new, path)
        return
    with temporaries.part(path, folder=True) as older:
        os.rename(path, older / path.name)
        try:
            os.rename(new, path)
        except OSError:
            os.rename(older / path.name, path)
            raise
