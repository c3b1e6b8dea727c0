"""Folders that are written atomically, and replace only folders of the same kind.

Every command that writes a folder describes it by a `FolderKind`. An existing folder is
written only if it is empty or of that kind. This is checked before the command begins
its work, and again before it replaces the folder.

An `Artifact` is a kind of folder with a JSON header and arrays, whose reader trusts
neither; docs/architecture.md lists the kinds. The header has the kind, the version of
the format and a fingerprint of the arrays or of the model that they belong to. The
arrays are in a safetensors file, in .npz files, or in .npy files that are mapped into
memory. Nothing is unpickled, and all faults are reported as a `UserError` with the
file, the reason and the remedy.
"""

import contextlib
import dataclasses
import fcntl
import fnmatch
import os
import pathlib
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.storage import files, paths
from bpd_jax.storage.paths import as_path, part, sync

# `FolderKind.text` is searched in this many bytes of the marker.
_HEADER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class FolderKind:
    """How the folders of one writer are recognized.

    Attributes:
      title: name of the kind for messages, such as "an n-gram model".
      marker: name of a file that every folder of the kind contains.
      names: patterns (`fnmatch`) of the other files that it may contain. A folder with
        any other file, or with a folder in it, is not replaced.
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
        entries = [name for name in entries if not paths.is_temporary(name)]
        patterns = (self.marker, *self.names)
        for name in () if self.in_place else entries:
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                return f"it holds {name}, which is not part of {self.title}"
            if (folder / name).is_dir():
                return f"it holds the folder {name}, and {self.title} holds only files"
        marker = folder / self.marker
        if entries and not marker.is_file():
            return f"it is not {self.title}: it has no file {self.marker}"
        if entries and self.text:
            with marker.open("rb") as stream:
                if self.text.encode() not in stream.read(_HEADER_BYTES):
                    return f"its {self.marker} is not that of {self.title}"
        return None


def check_folder(path: str | os.PathLike[str], kind: FolderKind) -> None:
    """Checks that a folder can be written: it is new, empty or of this kind."""
    files.check_writable(path, folder=True)
    target = files.resolved(path)
    with files.os_errors_as_user_errors(path):
        reason = kind.foreign(target) if target.exists() else None
    if not kind.in_place and pathlib.Path.cwd().is_relative_to(target):
        reason = "it is the current folder or above it"
    if reason is not None:
        raise UserError(
            f"{path} is not written to: {reason}. Name a new folder, or move what is "
            "there away."
        )


@contextlib.contextmanager
def only_writer(path: str | os.PathLike[str]) -> Iterator[None]:
    """Refuses a second command that adds files to a folder at the same time.

    The folder is made, and removed if it is empty in the end. Commands of other
    machines are not noticed, nor are any under gs:// and on the few file systems that
    cannot lock folders.
    """
    folder = files.resolved(path)
    if paths.in_bucket(folder):
        yield
        return
    with files.os_errors_as_user_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another command is writing to {path}: wait until it ends, or "
                    "name another folder."
                ) from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
    finally:
        os.close(descriptor)


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
    with (
        files.os_errors_as_user_errors(path),
        part(paths.work_place(target), folder=True) as temporary,
    ):
        yield temporary
        # Something else may have been written there meanwhile.
        check_folder(path, kind)
        if paths.in_bucket(target):
            paths.upload_folder(temporary, target, kind.marker)
            return
        sync(temporary)
        with part(target, folder=True, suffix=paths.OLDER) as older:
            if target.exists():
                os.rename(target, older / target.name)
            try:
                os.rename(temporary, target)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(older / target.name, target)
                raise
        sync(target.parent, contents=False)


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
        with part(target, folder=True) as temporary:
            os.rename(target, temporary / target.name)


@dataclasses.dataclass(frozen=True)
class Artifact(FolderKind):
    """A kind of artifact; see `FolderKind`, whose `marker` is the header.

    Attributes:
      remedy: how to obtain such a folder, for error messages.
      version: version of the format.
    """

    remedy: str = "get the folder again"
    version: int = 1

    def write_header(
        self, folder: str | os.PathLike[str], header: Mapping[str, Any]
    ) -> None:
        """Writes the header, with the kind and the version added, atomically."""
        content = {"artifact": self.title, "version": self.version, **header}
        files.write_json(as_path(folder) / self.marker, content)

    def read_header(
        self,
        folder: str | os.PathLike[str],
        fields: Mapping[str, type | UnionType] | None = None,
    ) -> dict[str, Any]:
        """Reads the header; `fields` are required, with their types."""
        path = as_path(folder) / self.marker
        with self.reading(path):
            header: dict[str, Any] = files.read_json(path)
            if type(header) is not dict:
                raise ValueError("it is not a JSON object")
            # Older headers lack the kind and call the version "format".
            version = header.get("version", header.get("format"))
            if type(version) is not int or version != self.version:
                raise ValueError(f"it is not of format {self.version}")
            if header.get("artifact", self.title) != self.title:
                raise ValueError(f"it is not the header of {self.title}")
            for name, kind in (fields or {}).items():
                value = header.get(name)
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise ValueError(f"{name} is missing or of another type")
        return header

    @contextlib.contextmanager
    def reading(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Context that reports all faults of a file as a `UserError`."""
        try:
            yield
        except Exception as error:  # What libraries raise for forged files varies.
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            folder, name = os.path.split(path)
            if missing and name == self.marker:
                raise UserError(
                    f"{folder} does not hold {self.title}: {path} is missing; "
                    f"{self.remedy}."
                ) from None
            # numpy's messages have further lines, which are for programmers.
            text = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(
                f"cannot read {path} ({text.rstrip('.')}): {self.remedy}."
            ) from error
