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
from bpd_jax.storage import buckets, files, temporaries
from bpd_jax.storage.buckets import BucketPath

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
        """Returns why a folder is not of this kind; None if it is, or is empty.

        Raises:
          OSError: it cannot be read.
        """
        entries = sorted(
            path.name
            for path in folder.iterdir()
            if not temporaries.is_temporary(path.name)
        )
        if not entries:
            return None
        patterns = (self.marker, *self.names)
        for name in () if self.in_place else entries:
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                return f"it holds {name}, which is not part of {self.title}"
        marker = folder / self.marker
        if not marker.is_file():
            if buckets.unfinished_upload(folder) == self.title:
                return None
            return f"it is not {self.title}: it has no file {self.marker}"
        if self.text:
            with marker.open("rb") as stream:
                if self.text.encode() not in stream.read(_HEADER_BYTES):
                    return f"its {self.marker} is not that of {self.title}"
        return None


def check_folder(path: str | os.PathLike[str], kind: FolderKind) -> None:
    """Checks that a folder can be written: it is new, empty or of this kind.

    Args:
      path: path of the folder, which need not exist; links are followed.
      kind: kind of folder that is to be written.

    Raises:
      UserError: it contains something else, is not a folder, or cannot be written.
    """
    files.check_writable(path, folder=True)
    target = files.resolved(path)
    with files.os_errors_as_user_errors(path), contextlib.ExitStack() as stack:
        if not isinstance(target, BucketPath):
            # Another process may be between the two renames that replace the folder.
            stack.enter_context(temporaries.exclusive(target.parent))
        _check_kind(target, path, kind)


def _check_kind(
    target: pathlib.Path, path: str | os.PathLike[str], kind: FolderKind
) -> None:
    """See `check_folder`; `target` is what `path` resolves to."""
    if not target.exists():
        return
    reason: str | None = "it is a file"
    on_disk = not kind.in_place and not isinstance(target, BucketPath)
    if on_disk and pathlib.Path.cwd().is_relative_to(target):
        reason = "it is the current folder or above it"
    elif on_disk and os.path.ismount(target):
        reason = "it is a mounted file system"
    elif target.is_dir():
        reason = kind.foreign(target)
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
    stays, and its target is replaced. If several processes write the same folder, the
    last one wins.

    A folder under gs:// is written on the local disk and uploaded. During the upload,
    and after one that was interrupted, readers refuse the folder; see
    `buckets.upload_folder`.

    Raises:
      UserError: `path` is not of this kind, cannot be written, or the disk is full.
    """
    check_folder(path, kind)
    target = files.resolved(path)
    with files.os_errors_as_user_errors(path):
        local = buckets.on_disk(target)
        local.parent.mkdir(parents=True, exist_ok=True)
        temporaries.remove_remainders(local.parent, local.name)
        with temporaries.part(local, folder=True) as temporary:
            yield temporary
            if isinstance(target, BucketPath):
                _check_kind(target, path, kind)
                buckets.upload_folder(temporary, target, kind.marker, kind.title)
                return
            temporaries.sync(temporary)
            with temporaries.exclusive(target.parent):
                # Another process may have written there while this command ran.
                _check_kind(target, path, kind)
                _swap(temporary, target)
            temporaries.sync_folder(target.parent)


def remove_folder(path: str | os.PathLike[str], kind: FolderKind) -> None:
    """Removes a folder of this kind, if it exists.

    It is renamed first, so that nobody finds a part of it under its name.

    Raises:
      UserError: it is of another kind, or cannot be removed.
    """
    target = files.resolved(path)
    if not target.exists():
        return
    check_folder(path, kind)
    if isinstance(target, BucketPath):
        with files.os_errors_as_user_errors(path):
            buckets.remove_folder(target, kind.marker)
        return
    with (
        files.os_errors_as_user_errors(path),
        temporaries.part(target, folder=True) as temporary,
    ):
        os.rename(target, temporary / target.name)


def _swap(new: pathlib.Path, path: pathlib.Path) -> None:
    """Renames `new` to `path`; an older folder there is renamed to `new`."""
    if not path.exists():
        os.rename(new, path)
        return
    old = new.with_suffix(temporaries.OLD_SUFFIX)
    os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        os.rename(old, path)
        raise
    # The caller removes it, or the next writer if this process is killed.
    with contextlib.suppress(OSError):
        os.rename(old, new)
