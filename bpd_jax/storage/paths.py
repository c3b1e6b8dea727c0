"""Paths on a disk, and under gs:// in Google Cloud Storage.

`as_path` turns a name into a `pathlib.Path`, or under gs:// into a `BucketPath`, which
is an `etils.epath.Path` above gcsfs. Paths on a disk are not those of `epath`, which
hides files whose names end with `~`: `folders` must see every file. `matching` turns a
pattern into files; whatever exists is no pattern.

- Reading: an object is opened as a copy on the local disk (`local_copy`), so files of a
  bucket can be mapped into memory, and each is copied once.
- Writing: `files` and `folders` write on the local disk and upload the result.

Temporary files and folders are beside the result and are called
`.bpd_jax-NAME.RANDOM.part`. A process that is killed leaves its own, which `make clean`
removes; `.older`, which may hold the only copy of a replaced folder, stays, and so does
what is kept of buckets in `~/.cache/bpd_jax`.
"""

import atexit
import base64
import contextlib
import errno
import functools
import glob
import hashlib
import os
import pathlib
import re
import secrets
import shutil
import stat
import tempfile
import types
from collections.abc import Iterator
from typing import IO, Any, cast

from etils.epath import gpath

from bpd_jax.base.compiled import cache_folder
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import expand_home

# `epath`, also that of Orbax, uses gcsfs; otherwise it would use the client of
# TensorFlow where that is installed. It reads this when the first path is used.
os.environ.setdefault("EPATH_USE_TF", "false")

PREFIX, SUFFIX = ".bpd_jax-", ".part"
# Of the folder that holds an older one while that is replaced.
OLDER = ".older"


def as_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a name, local or under gs://; other schemes are refused.

    `~` at its beginning is the home folder.
    """
    text = str(path)
    if not text.startswith("gs:/"):
        if re.match(r"[a-z][a-z0-9+.-]*://", text):
            raise UserError(f"{path} is not supported: give a local or a gs:// path.")
        return pathlib.Path(expand_home(os.fspath(path)))
    # `pathlib` turns gs://bucket into gs:/bucket.
    names = text.removeprefix("gs:").strip("/").split("/")
    if not names[0] or ".." in names:
        raise UserError(f"{path} is not a path such as gs://bucket/folder.")
    return cast(pathlib.Path, BucketPath("gs://" + "/".join(names)))


def matching(pattern: str, parameter: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """The files that a pattern matches, and the folder that their names begin in.

    `**` matches nested folders, `~` is the home folder. What exists is taken as it is,
    even if its name has `*`, `?` or brackets: only the rest is a pattern. The files,
    which may be read several times, are sorted, and there is at least one.
    """
    root, rest = pathlib.Path(expand_home(pattern)), ""
    while not os.path.lexists(root):
        root, rest = root.parent, os.path.join(root.name, rest)
    rest = rest.rstrip("/")
    if not rest:
        root, rest = root.parent, glob.escape(root.name)
    # With several `**`, glob yields a file once for every way to match it.
    found = {root / name for name in glob.glob(rest, root_dir=root, recursive=True)}
    files = sorted(path for path in found if not path.is_dir())
    if not files:
        folder = os.path.isdir(expand_home(pattern))
        reason = "is a folder" if folder else "matches no file: check the path"
        words = f"{parameter}={pattern!r} {reason}"
        raise UserError(f"{words}; '**' matches nested folders.")
    for path in files:
        check_file(path)
    return root, files


def check_file(path: str | os.PathLike[str]) -> None:
    """Refuses a pipe or another stream, which can be read only once and in order."""
    with contextlib.suppress(OSError, ValueError):
        if not stat.S_ISDIR(mode := os.stat(path).st_mode) and not stat.S_ISREG(mode):
            raise UserError(
                f"{path} is a pipe or a device, but it is not read once from beginning "
                "to end: write its contents to a file first."
            )


def check_plain(folder: str, library: str) -> None:
    """Refuses a folder for a library that takes its name for a pattern."""
    if glob.has_magic(folder) or "\\" in folder:
        raise UserError(
            f"{library} would take {folder} for a pattern: name a folder without *, ?, "
            "[ and backslashes."
        )


def in_bucket(path: str | os.PathLike[str]) -> bool:
    """Whether a path is under gs://."""
    return str(path).startswith("gs://")


def local_copy(path: str | os.PathLike[str]) -> pathlib.Path:
    """A regular file on the local disk: the path itself, or a copy of the object.

    Copies are kept in `~/.cache/bpd_jax/buckets` by version: a process that has mapped
    one is not disturbed when the object is replaced. (The `filecache` of fsspec writes
    all versions into one file.)
    """
    if not in_bucket(path):
        check_file(path)
        return pathlib.Path(path)
    with _requests(path) as system:
        facts = system.info(str(path))
        if facts["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        size, version = int(facts["size"]), repr(sorted(facts.items()))
        above = _cache("files", hashlib.sha256(str(path).encode()).hexdigest()[:32])
        folder = above / hashlib.sha256(version.encode()).hexdigest()[:32]
        copy = folder / pathlib.PurePath(path).name
        if copy.exists() and copy.stat().st_size == size:
            return copy
        folder.mkdir(parents=True, exist_ok=True)
        with part(copy) as temporary:
            check = "md5" if "md5Hash" in facts else "size"
            system.get_file(str(path), os.fspath(temporary), consistency=check)
            if (received := temporary.stat().st_size) != size:
                words = f"received {received:,} of {size:,} bytes"
                raise OSError(errno.EIO, f"{words}; run the command again", str(path))
            os.replace(temporary, copy)
        for old in {*above.glob(f"*/{copy.name}")} - {copy}:
            old.unlink(missing_ok=True)
    return copy


def work_place(path: pathlib.Path) -> pathlib.Path:
    """Where a result is made: `path` itself, or its place on the local disk."""
    if not in_bucket(path):
        return path
    local = _cache("uploads", *str(path).removeprefix("gs://").split("/"))
    local.parent.mkdir(parents=True, exist_ok=True)
    return local


def upload(source: pathlib.Path, path: pathlib.Path) -> None:
    """Uploads a file; the object appears as a whole, with a verified checksum."""
    with _requests(path) as system:
        system.put_file(os.fspath(source), str(path), consistency="md5")


def upload_folder(source: pathlib.Path, path: pathlib.Path, marker: str) -> None:
    """Uploads a folder in place of another one of its kind.

    The marker, without which readers refuse the folder, is removed first and uploaded
    last.
    """
    names = [p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()]
    names = sorted(set(names) - {marker})
    (path / marker).unlink(missing_ok=True)
    with _requests(path) as system:
        system.put(
            [os.fspath(source / name) for name in names],
            [f"{path}/{name}" for name in names],
            consistency="md5",
        )
    for stale in objects(path).keys() - {*names}:
        (path / stale).unlink()
    upload(source / marker, path / marker)


def objects(path: pathlib.Path) -> dict[str, str | None]:
    """Objects of a folder under gs:// by name, with the MD5 in hexadecimal digits.

    It is None where the bucket does not keep it: for composite objects.
    """
    with _requests(path) as system:
        found = system.find(str(path), detail=True)
    above = f"{path}/".removeprefix("gs://")
    return {
        name.removeprefix(above): (md5 := facts.get("md5Hash"))
        and base64.b64decode(md5).hex()
        for name, facts in found.items()
    }


class BucketPath(gpath.PosixGPath):
    """A file or folder under gs://; a folder exists while it contains objects.

    The methods that read have the arguments and results of `pathlib.Path`; every
    failure is an `OSError`.
    """

    def exists(self) -> bool:
        return bool(self._type())

    def is_dir(self) -> bool:
        return self._type() == "directory"

    def is_file(self) -> bool:
        return self._type() == "file"

    def _type(self) -> str:
        with contextlib.suppress(FileNotFoundError), _requests(self) as system:
            return str(system.info(str(self))["type"])
        return ""

    def stat(self) -> Any:
        """Size and time of change, with the names of `os.stat_result`."""
        with _requests(self) as system:
            facts = system.info(str(self))
        changed = facts.get("mtime")
        seconds = changed.timestamp() if changed else 0.0
        return types.SimpleNamespace(
            st_size=int(facts["size"]), st_mtime_ns=int(seconds * 1e9)
        )

    def iterdir(self) -> Iterator["BucketPath"]:
        with _requests(self) as system:
            found = system.ls(str(self), detail=False)
        names = {pathlib.PurePath(name).name for name in found}
        # A folder may be an object itself, which is listed.
        return (self / name for name in sorted(names - {self.name}))

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        with _requests(self) as system:
            found = system.glob(f"{glob.escape(str(self))}/{pattern}")
        return (type(self)(f"gs://{name}") for name in found)

    def open(self, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
        """Opens the local copy for reading."""
        if set(mode) - set("rbt"):
            words = "objects under gs:// cannot be modified in place"
            raise OSError(errno.ENOTSUP, words, str(self))
        return local_copy(self).open(mode, *args, **options)

    def mkdir(self, *args: Any, **options: Any) -> None:
        """Does nothing: a folder exists as soon as it contains an object."""

    def write_bytes(self, data: bytes) -> int:
        with _requests(self) as system:
            system.pipe_file(str(self), data)
        return len(data)

    def unlink(self, missing_ok: bool = False) -> None:
        ignored = [FileNotFoundError] * missing_ok
        with contextlib.suppress(*ignored), _requests(self) as system:
            system.rm_file(str(self))

    def resolve(self, strict: bool = False) -> "BucketPath":
        return self

    absolute = expanduser = resolve


class DiskPath(gpath.PosixGPath):
    """A path on a disk for Orbax; that of `epath` takes brackets for a pattern."""

    def glob(self, pattern: str) -> Iterator["DiskPath"]:
        return (self / name for name in glob.glob(pattern, root_dir=self))


@contextlib.contextmanager
def _requests(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Yields gcsfs, and turns what it raises into an `OSError` of `path`."""
    try:
        import fsspec

        # Other programs and TensorStore change buckets, too.
        system = fsspec.filesystem("gcs", use_listings_cache=False)
    except ImportError as error:
        raise UserError(
            f"paths under gs:// need the extra gcs ({error}): pip install "
            "'bpd_jax[gcs]'."
        ) from error
    try:
        yield system
    except Exception as error:  # gcsfs raises what five libraries raise.
        if isinstance(error, UserError) or getattr(error, "errno", None):
            raise
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, "not found", str(path)) from error
        words = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise OSError(errno.EIO, words, str(path)) from error


def _cache(*parts: str) -> pathlib.Path:
    """Where files of buckets are; in a temporary folder if nothing can be kept."""
    cache = cache_folder()
    if cache is not None:
        with contextlib.suppress(OSError):
            (folder := cache / "buckets").mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder.joinpath(*parts)
    return _temporary_folder().joinpath(*parts)


@functools.cache
def _temporary_folder() -> pathlib.Path:
    """A folder of this process, which is removed at its end."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def beside(path: pathlib.Path, suffix: str = SUFFIX) -> pathlib.Path:
    """A new temporary name in the folder of a path, which no other process has."""
    name = f"{PREFIX}{path.name[:200]}.{secrets.token_hex(8)}{suffix}"
    return path.with_name(name)


@contextlib.contextmanager
def part(
    path: pathlib.Path, *, folder: bool = False, suffix: str = SUFFIX
) -> Iterator[pathlib.Path]:
    """Yields a new empty file or folder beside `path`; removes it in the end.

    Its name cannot be predicted and an existing file is never opened, so a planted link
    is not followed. It has the permissions of `path`, if that exists.
    """
    temporary = beside(path, suffix)
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
    """Whether this is the name of one of our temporary files and folders."""
    return name.startswith(PREFIX) and name.endswith((SUFFIX, OLDER))


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
