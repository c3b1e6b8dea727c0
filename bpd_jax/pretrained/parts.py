"""A large file in parts, to carry it to a machine that has no network.

FOLDER/parts.json       name, size and SHA-256 digest of the file and of every part
FOLDER/part_001 …       its bytes, in order
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from bpd_jax import files, folders
from bpd_jax.errors import UserError

HEADER = "parts.json"
KIND = folders.FolderKind("a file in parts", HEADER, ("part_*",), '"parts"')

_CHUNK = 1 << 20
# What a digest and a plain file name look like.
_DIGEST, _NAME = re.compile("[0-9a-f]{64}"), re.compile(r"[\w.-]+")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A file: name, size in bytes, SHA-256 digest in hexadecimal."""

    name: str
    size: int
    digest: str


def split_file(
    path: str | os.PathLike[str], folder: str | os.PathLike[str], most_bytes: int
) -> list[Piece]:
    """Writes a file in parts of at most `most_bytes`.

    Args:
      path: the file.
      folder: that receives the parts and the manifest; replaced as a whole.
      most_bytes: of a part, at least 1.

    Raises:
      UserError: the file cannot be read, or the folder cannot be written.
    """
    path = pathlib.Path(path)
    if most_bytes < 1:
        raise UserError(f"parts of {most_bytes} bytes are too small: give 1 or more.")
    parts: list[Piece] = []
    whole = hashlib.sha256()
    with folders.replacing_folder(folder, KIND) as temporary:
        try:
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                for number in range(1, max(-(-size // most_bytes), 1) + 1):
                    name = f"part_{number:03}"
                    parts.append(_copy(stream, temporary / name, most_bytes, whole))
        except OSError as error:
            raise UserError(f"cannot split {path}: {error.strerror}.") from error
        manifest = {
            "file": dataclasses.asdict(Piece(path.name, size, whole.hexdigest())),
            "parts": [dataclasses.asdict(part) for part in parts],
        }
        text = json.dumps(manifest, indent=2) + "\n"
        (temporary / HEADER).write_text(text, encoding="utf-8")
    return parts


def _copy(stream: BinaryIO, path: pathlib.Path, size: int, whole: Any) -> Piece:
    """Copies up to `size` bytes into a file, and adds them to a second digest."""
    digest, left = hashlib.sha256(), size
    with path.open("wb") as output:
        while left and (chunk := stream.read(min(left, _CHUNK))):
            for each in (digest, whole):
                each.update(chunk)
            output.write(chunk)
            left -= len(chunk)
    return Piece(path.name, size - left, digest.hexdigest())


@contextlib.contextmanager
def joined_file(folder: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields the file that was split, in a temporary folder.

    Raises:
      UserError: a part is missing, or it or the whole has another digest.
    """
    folder = pathlib.Path(folder)
    file, parts = _manifest(folder)
    with tempfile.TemporaryDirectory(prefix="bpd_jax_") as temporary:
        path = pathlib.Path(temporary) / file.name
        whole = hashlib.sha256()
        with path.open("wb") as output:
            for part in parts:
                _append(folder / part.name, part, output, whole)
        if whole.hexdigest() != file.digest:
            raise UserError(
                f"the parts in {folder} are not those of {file.name}: split it again."
            )
        yield path


def _append(path: pathlib.Path, part: Piece, output: BinaryIO, whole: Any) -> None:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                whole.update(chunk)
                output.write(chunk)
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}): copy all parts in {HEADER}."
        ) from error
    if digest.hexdigest() != part.digest:
        raise UserError(
            f"{path} is damaged: its SHA-256 digest is not that of {HEADER}; copy it "
            "again."
        )


def _manifest(folder: pathlib.Path) -> tuple[Piece, list[Piece]]:
    path = folder / HEADER
    try:
        facts = files.read_json(path)
        file = Piece(**facts["file"])
        parts = [Piece(**part) for part in facts["parts"]]
        for piece in (file, *parts):
            named = _NAME.fullmatch(piece.name) and piece.name.strip(".")
            if not named or not _DIGEST.fullmatch(piece.digest):
                raise ValueError(f"{piece.name!r} has no plain name or no digest")
        return file, parts
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no {HEADER}: write it with python -m "
            "benchmarks.accelerator --split_weights=FOLDER."
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} does not list the parts of a file: {error}."
        ) from error
