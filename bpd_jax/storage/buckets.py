"""Paths under gs://: objects of Google Cloud Storage, used as files.

`as_path` turns a name into a path; a name under gs:// becomes a `BucketPath`.

- Reading: a `BucketPath` is opened as a copy of the object on the local disk. The copy
  is made when the object is first opened, compared with the object's size and checksum,
  and kept in `~/.cache/bpd_jax/buckets` under the object's name, generation and size.
  So every host copies only the files that it reads, once.
- Writing: `files` and `folders` write locally and upload. An object appears as a whole
  or not at all; the marker of a folder is uploaded last (`upload_folder`).

The packages of the extra `gcs` are imported when the first such path is used.
"""

import base64
import concurrent.futures
import contextlib
import errno
import fnmatch
import functools
import json
import os
import pathlib
import re
import stat
from collections.abc import Generator, Iterator
from typing import IO, Any

from bpd_jax.base.errors import UserError
from bpd_jax.storage import temporaries

# In a folder that is being uploaded, or whose upload was interrupted.
UPLOAD = ".upload" + temporaries.SUFFIX
_THREADS = 8
_PATIENCE = 60.0  # seconds for which a request that fails is repeated
_NO_PARTS = "objects under gs:// cannot be modified in place"


def as_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a `BucketPath` for a name under gs://, else a `pathlib.Path`.

    Raises:
      UserError: a name under gs:// has no bucket or goes up with `..`, or the path
        begins with another scheme, such as `s3://`.
    """
    if isinstance(path, BucketPath):
        return path
    text = str(path)  # `pathlib` turns gs://bucket into gs:/bucket.
    if not text.startswith("gs:/"):
        if re.match(r"[a-z][a-z0-9+.-]*://", text):
            raise UserError(f"{path} is not supported: give a local or a gs:// path.")
        return pathlib.Path(path)
    bucket_path = BucketPath(text)
    if len(bucket_path.parts) < 2 or ".." in bucket_path.parts:
        raise UserError(f"{path} is not a path such as gs://bucket/folder.")
    return bucket_path


class BucketPath(pathlib.PosixPath):
    """A file or folder under gs://.

    A folder is a common prefix of object names that ends with a slash; it exists while
    it contains objects. Every failure is an `OSError`.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return super().__str__().replace("gs:/", "gs://", 1)

    def __fspath__(self) -> str:
        return os.fspath(self.local())

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """Name of the object in the bucket."""
        return "/".join(self.parts[2:])

    def absolute(self) -> "BucketPath":
        """Itself."""
        return self

    def resolve(self, strict: bool = False) -> "BucketPath":
        """Itself: there are no links."""
        return self

    def expanduser(self) -> "BucketPath":
        """Itself."""
        return self

    def local(self) -> pathlib.Path:
        """A copy of the object on the local disk, of the size that it has.

        Raises:
          OSError: there is no such object, or it cannot be copied as a whole.
        """
        blob = self._blob()
        if blob is not None:
            return _copy(self, blob)
        raise _failure(errno.EISDIR if self.is_dir() else errno.ENOENT, self)

    def read_generation(self) -> tuple[bytes, int]:
        """Content and generation: b"" and 0 if missing, b"" if larger than 64 KiB."""
        with _requests(self):
            while (blob := self._blob()) is not None:
                # A download overwrites the attributes of `blob`.
                generation = blob.generation
                if blob.size > 2**16:
                    return b"", generation
                # If it is replaced meanwhile, this generation is not found.
                with contextlib.suppress(_api_errors().NotFound):
                    content = blob.download_as_bytes(
                        if_generation_match=generation, retry=_retry()
                    )
                    return content, generation
        return b"", 0

    def write_generation(self, content: bytes, generation: int | None = None) -> int:
        """Writes an object.

        Args:
          content: all of it.
          generation: generation to replace, 0 if it must not exist; None for any.

        Returns:
          The new generation.

        Raises:
          FileExistsError: it has another generation.
          OSError: it cannot be written.
        """
        with _requests(self):
            blob = _bucket(self.bucket).blob(self.key)
            options = {"if_generation_match": generation, "retry": _retry()}
            blob.upload_from_string(content, "application/octet-stream", **options)
            return blob.generation

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Kind, size and time of a file or folder, nothing else."""
        blob = self._blob()
        if blob is not None:
            seconds = blob.updated.timestamp() if blob.updated else 0.0
            return _status(stat.S_IFREG | 0o644, blob.size, seconds)
        with _requests(self):
            for _ in _list(self, recursive=True, max_results=1):
                return _status(stat.S_IFDIR | 0o755, 0, 0.0)
        raise _failure(errno.ENOENT, self)

    def iterdir(self) -> Generator["BucketPath", None, None]:
        """Files and folders directly in a folder, in the order of their names."""
        with _requests(self):
            listed = _list(self, recursive=False)
            names = {blob.name for blob in listed} | set(listed.prefixes)
        if not names and not self.is_dir():
            raise _failure(errno.ENOENT, self)
        above = _prefix(self)
        for name in sorted(name.removeprefix(above).strip("/") for name in names):
            if name:
                yield self / name

    def glob(self, pattern: str) -> Generator["BucketPath", None, None]:
        """Paths below the folder that match a pattern without `**`."""
        first, _, rest = pattern.partition("/")
        with contextlib.suppress(FileNotFoundError):
            for path in self.iterdir():
                if not fnmatch.fnmatchcase(path.name, first):
                    continue
                if rest:
                    yield from path.glob(rest)
                else:
                    yield path

    def rglob(self, pattern: str) -> Generator["BucketPath", None, None]:
        """Files below the folder, at any depth, whose names match a pattern."""
        for name in generations(self):
            path = self / name
            if not name.endswith("/") and fnmatch.fnmatchcase(path.name, pattern):
                yield path

    def open(  # type: ignore[override]
        self, mode: str = "r", *args: Any, **options: Any
    ) -> IO[Any]:
        """Opens the local copy for reading."""
        if set(mode) - set("rbt"):
            raise _failure(errno.ENOTSUP, self, _NO_PARTS)
        return self.local().open(mode, *args, **options)

    def mkdir(self, *args: Any, **options: Any) -> None:
        """Does nothing: a folder exists as soon as it contains an object."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes an object."""
        with _requests(self):
            try:
                _bucket(self.bucket).blob(self.key).delete(retry=_retry())
            except _api_errors().NotFound:
                if not missing_ok:
                    raise

    def rename(self, target: Any) -> Any:
        """Not possible, as writing a part of an object is not."""
        raise _failure(errno.ENOTSUP, self, _NO_PARTS)

    def _blob(self) -> Any:
        """The description of the object; None if there is none."""
        if not self.key:
            return None
        with _requests(self):
            return _bucket(self.bucket).get_blob(self.key, retry=_retry())


def on_disk(path: pathlib.Path) -> pathlib.Path:
    """The folder on the local disk for temporary work: `path`, if it is on a disk."""
    return staging(path) if isinstance(path, BucketPath) else path


def staging(path: BucketPath) -> pathlib.Path:
    """Where the file or folder is written on the local disk before its upload.

    Raises:
      OSError: the local disk cannot be written.
    """
    local = _cache("uploads", path.bucket, *path.parts[2:])
    local.parent.mkdir(parents=True, exist_ok=True)
    return local


def upload(
    source: pathlib.Path, path: BucketPath, generation: int | None = None
) -> int:
    """Uploads a file; the object is created or replaced atomically.

    Args:
      source: on the local disk.
      path: of the object.
      generation: generation to replace, 0 if it must not exist; None for any.

    Returns:
      The new generation.

    Raises:
      FileExistsError: it has another generation.
      OSError: it could not be uploaded, or has another size afterwards.
    """
    with _requests(path):
        blob = _bucket(path.bucket).blob(path.key)
        blob.upload_from_filename(
            os.fspath(source), if_generation_match=generation, retry=_retry()
        )
    _check_size(path, blob.size, source.stat().st_size)
    return blob.generation


def upload_folder(
    source: pathlib.Path, path: BucketPath, marker: str, title: str
) -> None:
    """Uploads a folder in place of another one of its kind.

    The marker of the older one is removed first and the new one uploaded last, so an
    interrupted upload leaves no marker. Until then an object `UPLOAD` contains the
    title. If two processes upload to one folder at the same time, at most one of them
    succeeds: each replaces only objects that existed when it began, and removes its
    marker if the folder then contains anything that it did not upload.

    Args:
      source: folder on the local disk.
      path: folder in the bucket.
      marker: name of the file without which readers refuse the folder.
      title: of the kind of folder; see `unfinished_upload`.

    Raises:
      OSError: it could not be uploaded, or another process uploads there.
    """
    names = [p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()]
    note = json.dumps({"title": title}).encode()
    uploaded = {UPLOAD: (path / UPLOAD).write_generation(note)}
    before = {name: g for name, g in generations(path).items() if name != UPLOAD}
    try:
        if marker in before:
            _delete(path / marker, before.pop(marker))

        def send(name: str) -> int:
            return upload(source / name, path / name, before.get(name, 0))

        rest = [name for name in names if name != marker]
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            uploaded |= zip(rest, pool.map(send, rest), strict=True)
            stale = before.keys() - set(rest)
            list(pool.map(lambda name: _delete(path / name, before[name]), stale))
        uploaded[marker] = send(marker)
        if generations(path) != uploaded:
            _delete(path / marker, uploaded[marker])
            raise FileExistsError
    except FileExistsError as error:
        words = "another process is uploading to it; retry after it has finished"
        raise _failure(errno.EBUSY, path, words) from error
    _delete(path / UPLOAD, uploaded[UPLOAD])


def remove_folder(path: BucketPath, marker: str) -> None:
    """Removes all objects of a folder, the marker first."""
    (path / marker).unlink(missing_ok=True)
    for name, generation in generations(path).items():
        _delete(path / name, generation)


def unfinished_upload(path: pathlib.Path) -> str | None:
    """The title of the folder whose upload to `path` did not finish; None if none."""
    if not isinstance(path, BucketPath):
        return None
    content, generation = (path / UPLOAD).read_generation()
    if not generation:
        return None
    try:
        return str(json.loads(content)["title"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def generations(path: BucketPath) -> dict[str, int]:
    """Generations of all objects of a folder, by their names within it."""
    return {name: blob.generation for name, blob in _objects(path)}


def md5_sums(path: BucketPath) -> list[tuple[BucketPath, str | None]]:
    """All objects of a folder with their MD5 in hexadecimal digits.

    It is None where the bucket does not keep it: for composite objects.
    """
    return [
        (path / name, blob.md5_hash and base64.b64decode(blob.md5_hash).hex())
        for name, blob in _objects(path)
    ]


def _copy(path: BucketPath, blob: Any) -> pathlib.Path:
    """Copies one generation of an object into the cache, unless it is there."""
    if ".." in path.parts:
        raise _failure(errno.EINVAL, path, "the name goes up with ..")
    above = _cache("files", path.bucket, *path.parts[2:-1])
    copy = above / f"@{blob.generation}-{blob.size}" / path.name
    if copy.exists():
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    # One process copies it while the others that want it wait.
    with temporaries.exclusive(copy.parent):
        if copy.exists():
            return copy
        temporaries.remove_remainders(copy.parent, copy.name)
        with temporaries.part(copy) as temporary, _requests(path):
            blob.download_to_filename(
                os.fspath(temporary),
                if_generation_match=blob.generation,
                retry=_retry(),
            )
            _check_size(path, temporary.stat().st_size, blob.size)
            temporaries.sync(temporary)  # A copy is not compared again when it is used.
            os.replace(temporary, copy)
    # Processes that map or read an older copy can still use it after its removal.
    for old in above.glob(f"@*/{path.name}"):
        if old != copy:
            old.unlink(missing_ok=True)
    return copy


def _check_size(path: BucketPath, size: int, wanted: int) -> None:
    if size != wanted:
        words = f"received {size:,} of {wanted:,} bytes; run the command again"
        raise _failure(errno.EIO, path, words)


def _delete(path: BucketPath, generation: int) -> None:
    """Removes one generation of an object, if it is there."""
    with _requests(path), contextlib.suppress(_api_errors().NotFound):
        blob = _bucket(path.bucket).blob(path.key)
        blob.delete(if_generation_match=generation, retry=_retry())


def _objects(path: BucketPath) -> list[tuple[str, Any]]:
    """Name within a folder and description of all objects there."""
    with _requests(path):
        listed = list(_list(path, recursive=True))
    return [(blob.name.removeprefix(_prefix(path)), blob) for blob in listed]


def _prefix(path: BucketPath) -> str:
    return f"{path.key}/" if path.key else ""


def _list(path: BucketPath, *, recursive: bool, max_results: int | None = None) -> Any:
    return _bucket(path.bucket).list_blobs(
        prefix=_prefix(path),
        delimiter=None if recursive else "/",
        max_results=max_results,
        retry=_retry(),
    )


def _status(mode: int, size: int, seconds: float) -> os.stat_result:
    fields = (mode, 0, 0, 1, 0, 0, size, *[int(seconds)] * 3)
    return os.stat_result(fields, {"st_mtime_ns": int(seconds * 1e9)})


def _cache(*parts: str) -> pathlib.Path:
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache.joinpath("bpd_jax", "buckets", *parts)


def _failure(code: int, path: BucketPath, words: str | None = None) -> OSError:
    """The error of a path; the subclass of `OSError` depends on the code."""
    return OSError(code, words or os.strerror(code), str(path))


def _bucket(name: str) -> Any:
    return _client(os.getpid()).bucket(name)


@functools.cache
def _client(process: int) -> Any:
    """The client of this process; a forked one does not share its connections."""
    del process
    try:
        import google.cloud.storage as storage
    except ImportError as error:
        raise UserError(
            f"paths under gs:// need the extra gcs ({error}): pip install "
            "'bpd_jax[gcs]'."
        ) from error
    from google.auth.exceptions import GoogleAuthError

    try:
        return storage.Client()
    except (GoogleAuthError, OSError) as error:
        raise UserError(
            f"cannot log in to Google Cloud Storage: {_words(error)}"
        ) from error


def _retry() -> Any:
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_timeout(_PATIENCE)


def _api_errors() -> Any:
    from google.api_core import exceptions

    return exceptions


@contextlib.contextmanager
def _requests(path: BucketPath) -> Iterator[None]:
    """Turns what the client raises into an `OSError` of `path`."""
    _client(os.getpid())  # Raises a UserError if the package is missing.
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
    from requests import RequestException

    try:
        yield
    except exceptions.PreconditionFailed as error:
        raise _failure(errno.EEXIST, path, "it has changed") from error
    except exceptions.NotFound as error:
        words = f"not found; is there a bucket {path.bucket}?"
        raise _failure(errno.ENOENT, path, words) from error
    except (
        exceptions.GoogleAPIError,
        GoogleAuthError,
        DataCorruption,
        InvalidResponse,
        RequestException,
    ) as error:
        refused = isinstance(error, exceptions.Forbidden)
        code = errno.EACCES if refused else errno.EIO
        raise _failure(code, path, _words(error)) from error


def _words(error: BaseException) -> str:
    """The first line of the error message, without the details of the retries."""
    cause: Any = getattr(error, "cause", None) or error
    text = getattr(cause, "message", None) or str(cause)
    with contextlib.suppress(AttributeError, ValueError, LookupError, TypeError):
        text = cause.response.json()["error"]["message"]
    return str(text).strip().partition("\n")[0][:300].rstrip(".")
