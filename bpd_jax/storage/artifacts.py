"""Artifacts: folders with a JSON header and arrays.

Artifacts are block heads, block drafters, refiners, exported parameters, n-gram models
and counts, generated texts, cached states and packed rows. Checkpoints are not, nor are
files without arrays (the records of studies, which are JSON Lines, the settings of
runs, `drafting.json`) and the files in which studies keep intermediate results; see
docs/architecture.md.

The header is a JSON object with the version of the format; the arrays are in the same
folder in a safetensors file, in .npz files, or in .npy files that are mapped into
memory. `bpd_jax.storage.folders` writes a folder atomically and replaces only folders
of the same kind.

An `Artifact` is read safely: the header of a file is compared with its size before
anything is allocated, nothing is unpickled, and names, shapes and dtypes are validated
(`bpd_jax.storage.array_files`). All faults of a folder are reported as a `UserError`
with the file, the reason and the remedy.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bpd_jax.base.errors import UserError
from bpd_jax.storage import array_files, buckets, files, folders
from bpd_jax.storage.buckets import as_path

SAFETENSORS = ".safetensors"

# Exceptions while reading and interpreting a damaged or forged file.
_DAMAGE = (
    *array_files.DAMAGE,
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    SafetensorError,
    UserError,
    ValueError,
)


@dataclasses.dataclass(frozen=True)
class Artifact(folders.FolderKind):
    """A kind of artifact; see `FolderKind`, whose `marker` is the header.

    Attributes:
      remedy: how to obtain such a folder, for error messages.
      version: version of the format.
      version_name: field of the header with the version.
    """

    remedy: str = "get the folder again"
    version: int = 1
    version_name: str = "format"

    def write(
        self,
        folder: str | os.PathLike[str],
        header: Mapping[str, Any],
        name: str,
        arrays: Mapping[str, np.ndarray],
    ) -> None:
        """Writes a folder with one file of arrays atomically.

        Args:
          folder: output folder; an older one of this kind is replaced.
          header: JSON values; the version is added.
          name: file name of the arrays, which ends in .safetensors or .npz.
          arrays: arrays by name.

        Raises:
          UserError: the folder is of another kind, or cannot be written.
        """
        with folders.replacing_folder(folder, self) as temporary:
            if name.endswith(SAFETENSORS):
                save_file(dict(arrays), temporary / name)
            else:
                np.savez(temporary / name, **dict[str, Any](arrays))
            self.write_header(temporary, header)

    def write_header(
        self, folder: str | os.PathLike[str], header: Mapping[str, Any]
    ) -> None:
        """Writes only the header, atomically; see `write`."""
        content = {self.version_name: self.version, **header}
        files.write_json(as_path(folder) / self.marker, content)

    def read_header(
        self,
        folder: str | os.PathLike[str],
        fields: Mapping[str, type | UnionType] | None = None,
    ) -> dict[str, Any]:
        """Reads the header.

        Args:
          folder: folder of the artifact.
          fields: required fields with their types.

        Raises:
          UserError: the header is missing, damaged, of another version, or lacks a
            field.
        """
        path = as_path(folder) / self.marker
        try:
            header = files.read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            if buckets.unfinished_upload(path.parent) == self.title:
                raise UserError(
                    f"{folder} is not complete: the upload of {self.title} was "
                    "interrupted or has not finished; run the command that writes it "
                    "again."
                ) from None
            raise UserError(
                f"{folder} does not hold {self.title}: {path} is missing; "
                f"{self.remedy}."
            ) from None
        except (OSError, ValueError) as error:
            raise self.damaged(path, error) from error
        with self.reading(path):
            version = header.get(self.version_name) if type(header) is dict else None
            if type(version) is not int or version != self.version:
                raise ValueError(f"it is not of format {self.version}")
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
        except _DAMAGE as error:
            raise self.damaged(path, error) from error

    def damaged(self, path: str | os.PathLike[str], reason: object) -> UserError:
        """The error for a file that is missing, damaged or of another artifact."""
        # numpy's messages have further lines, which are for programmers.
        text = str(reason).strip().partition("\n")[0] or type(reason).__name__
        return UserError(f"cannot read {path} ({text.rstrip('.')}): {self.remedy}.")


def read_tensors(path: pathlib.Path) -> tuple[dict[str, np.ndarray], str]:
    """Reads a safetensors file.

    Returns:
      The arrays by name, and a digest of the file: 16 hexadecimal digits.

    Raises:
      OSError, SafetensorError: the file cannot be read, or is damaged.
    """
    return load_file(path), file_digest(path)[:16]


def file_digest(path: pathlib.Path) -> str:
    """The SHA-256 digest of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
