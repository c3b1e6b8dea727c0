"""Writing folders so that a writer replaces none but its own.

Every command that writes a folder describes what it writes by a `FolderKind`. A folder
that exists is written only if it is empty or is of that kind; otherwise the command
refuses before it begins, and again before it replaces anything.
"""

import contextlib
import dataclasses
import fnmatch
import os
import pathlib
from collections.abc import Iterator

from bpd_jax import buckets, files, temporaries
from bpd_jax.buckets import BucketPath
from bpd_jax.errors import UserError

# Headers are short; what comes after this many bytes tells nothing about their kind.
_HEADER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class FolderKind:
    """How the folders of one writer are recognised.

    Attributes:
      title: what such a folder is, for messages: "an n-gram model".
      marker: name of the file that each of them has.
      names: patterns (`fnmatch`) of the other names that one may have. A folder with
        any other file in it is not replaced.
      text: what stands somewhere in the marker, where its name alone says too little.
      in_place: whether the writer only adds files and never replaces the folder: then
        other files may lie there as well.
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
    """Refuses a folder that exists, is not empty and is not of this kind.

    Args:
      path: of the folder to write, which may not exist yet; links are followed.
      kind: of the writer.

    Raises:
      UserError: it holds something else, is not a folder, or cannot be written.
    """
    files.check_writable(path, folder=True)
    target = files.resolved(path)
    if isinstance(target, BucketPath):
        with files.telling(path):
            _check_kind(path, kind)
        return
    # Not while another process is between the two renames that replace the folder.
    with files.telling(path), temporaries.exclusive(target.parent):
        _check_kind(path, kind)


def _check_kind(path: str | os.PathLike[str], kind: FolderKind) -> None:
    target = files.resolved(path)
    reason = None
    if not target.exists():
        return
    if isinstance(target, BucketPath):
        reason = kind.foreign(target) if target.is_dir() else "it is a file"
    elif not kind.in_place and pathlib.Path.cwd().is_relative_to(target):
        reason = "it is the current folder or above it"
    elif not kind.in_place and os.path.ismount(target):
        reason = "it is a mounted file system"
    elif not target.is_dir():
        reason = "it is a file"
    else:
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

    An older folder of the same kind is replaced as a whole, and only then removed. If
    the block raises, the temporary folder is removed and `path` is untouched. A link
    stays, and the folder that it names is replaced. Of several processes that write
    the same folder, the last one wins.

    A folder under gs:// is written on the local disk and uploaded. While it replaces
    another one, and after an interruption, there is neither; see
    `buckets.upload_folder`.

    Raises:
      UserError: `path` is not of this kind, cannot be written, or the disk is full.
    """
    check_folder(path, kind)
    target = files.resolved(path)
    if isinstance(target, BucketPath):
        with files.telling(path):
            staged = buckets.staging(target)
            temporaries.remove_remainders(staged.parent, staged.name)
            with temporaries.part_folder(staged) as temporary:
                yield temporary
                _check_kind(path, kind)
                buckets.upload_folder(temporary, target, kind.marker, kind.title)
        return
    with files.telling(path):
        temporaries.remove_remainders(target.parent, target.name)
        with temporaries.part_folder(target) as temporary:
            yield temporary
            temporaries.sync(temporary)
            with temporaries.exclusive(target.parent):
                # Somebody may have written there while this command worked.
                _check_kind(path, kind)
                _swap(temporary, target)
            temporaries.sync_folder(target.parent)


def remove_folder(path: str | os.PathLike[str], kind: FolderKind) -> None:
    """Removes a folder of this kind, if there is one; other folders are left alone.

    It loses its name first, so that no half of it is met under that name.

    Raises:
      UserError: it holds something else, or cannot be removed.
    """
    target = files.resolved(path)
    if not target.exists():
        return
    check_folder(path, kind)
    if isinstance(target, BucketPath):
        with files.telling(path):
            buckets.remove_folder(target, kind.marker)
        return
    with files.telling(path), temporaries.part_folder(target) as temporary:
        os.rename(target, temporary / target.name)


def _swap(new: pathlib.Path, path: pathlib.Path) -> None:
    """Gives `new` the name `path`; what had it goes by the name `new` afterwards."""
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
    # Where the caller removes it, or the next writer if this process is killed.
    with contextlib.suppress(OSError):
        os.rename(old, new)
