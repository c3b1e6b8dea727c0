"""Splits a large file into parts, to copy it to a machine without a network.

FOLDER/parts.json       name, size and SHA-256 digest of the file and of every part
FOLDER/part_001 …       its bytes, in order
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Sequence

from bpd_jax.base.errors import UserError
from bpd_jax.storage import files, folders
from bpd_jax.storage.paths import as_path

HEADER = "parts.json"
KIND = folders.FolderKind("a file in parts", HEADER, ("part_*",), '"parts"')

# A plain file name, which every file system allows.
_NAME = re.compile(r"\w[\w.-]{0,254}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A file: name, size in bytes, SHA-256 digest in hexadecimal."""

    name: str
    size: int
    digest: str


def split_file(
    path: str | os.PathLike[str], folder: str | os.PathLike[str], most_bytes: int
) -> list[Piece]:
    """Writes a file in parts of at most `most_bytes`; reads one part at a time.

    The folder of the parts and the manifest is replaced as a whole.
    """
    path = as_path(path)
    if most_bytes < 1:
        raise UserError(f"parts of {most_bytes} bytes are too small: give 1 or more.")
    parts: list[Piece] = []
    total, size = hashlib.sha256(), 0
    with folders.replacing_folder(folder, KIND) as temporary:
        try:
            with path.open("rb") as stream:
                while (data := stream.read(most_bytes)) or not parts:
                    name = f"part_{len(parts) + 1:03}"
                    (temporary / name).write_bytes(data)
                    digest = hashlib.sha256(data).hexdigest()
                    parts.append(Piece(name, len(data), digest))
                    total.update(data)
                    size += len(data)
        except OSError as error:
            raise UserError(f"cannot split {path}: {error.strerror}.") from error
        manifest = {
            "file": dataclasses.asdict(Piece(path.name, size, total.hexdigest())),
            "parts": [dataclasses.asdict(part) for part in parts],
        }
        files.write_json(temporary / HEADER, manifest)
    return parts


def gather_parts(folders: Sequence[pathlib.Path], target: pathlib.Path) -> bool:
    """Links the parts of a file that are spread over folders into the folder `target`.

    Returns whether one of the folders, which exist, has a manifest.
    """
    found = {path.name: path for folder in folders for path in folder.glob("part_*")}
    manifests = [folder / HEADER for folder in folders if (folder / HEADER).is_file()]
    if not manifests:
        return False
    target.mkdir(parents=True, exist_ok=True)
    for name, path in {**found, HEADER: manifests[0]}.items():
        if not (target / name).exists():
            (target / name).symlink_to(path.resolve())
    return True


@contextlib.contextmanager
def joined_file(folder: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields the path of the joined file in a temporary folder."""
    folder = as_path(folder)
    file, parts = _manifest(folder)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix="bpd_jax_") as temporary:
        path = pathlib.Path(temporary) / file.name
        with path.open("wb") as output:
            for part in parts:
                data = _read(folder / part.name, part)
                digest.update(data)
                output.write(data)
        if digest.hexdigest() != file.digest:
            raise UserError(
                f"the parts in {folder} are not those of {file.name}: split it again."
            )
        yield path


def _read(path: pathlib.Path, part: Piece) -> bytes:
    data = None
    try:
        # A file of another size is damaged and is not read. A device, which has the
        # size 0, raises a `ValueError`.
        if path.stat().st_size == part.size:
            with contextlib.suppress(ValueError):
                data = files.read_bytes(path, part.size)
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}): copy all parts that {HEADER} "
            "lists."
        ) from error
    if data is None or hashlib.sha256(data).hexdigest() != part.digest:
        raise UserError(
            f"{path} is damaged: its size or SHA-256 digest differs from {HEADER}; "
            "copy it again."
        )
    return data


def _manifest(folder: pathlib.Path) -> tuple[Piece, list[Piece]]:
    path = folder / HEADER
    try:
        facts = files.read_json(path)
        file, *parts = [Piece(**piece) for piece in (facts["file"], *facts["parts"])]
        for piece in (file, *parts):
            if not _NAME.fullmatch(piece.name):
                raise ValueError(f"{piece.name!r} is not a plain file name")
        return file, parts
    except FileNotFoundError:
        raise UserError(
            f"{folder} contains no {HEADER}: write it with python -m "
            "benchmarks.accelerator --split_weights=FOLDER."
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} does not list the parts of a file: {error}."
        ) from error
