"""Artifacts: folders with a JSON header and arrays, each kind described once.

Whatever is kept on disk and is not a checkpoint is an artifact: block heads, block
drafters, refiners, slim models, n-gram models and counts, generated texts, cached
states, packed rows. Its header is a JSON object that states the version of the format;
its arrays lie beside the header in a safetensors file, in .npz files or in .npy files
that are mapped into memory. A folder is written through `bpd_jax.folders`, so that it
is replaced as a whole and no other folder is.

An `Artifact` reads with limits: nothing is allocated before the header of a file fits
its size, nothing is unpickled, and names, shapes and dtypes are checked
(`bpd_jax.array_files`). Whatever is wrong with a folder is reported as one `UserError`
that names the file, the reason, and how to get it again.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bpd_jax import array_files, buckets, files, folders
from bpd_jax.buckets import as_path
from bpd_jax.errors import UserError

SAFETENSORS, NPZ = ".safetensors", ".npz"

# What reading and interpreting a damaged or forged file raises.
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
      remedy: how to get such a folder again, for messages.
      version: of the format.
      version_name: field of the header that holds it.
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
        """Writes a folder with one file of arrays; it appears as a whole or not at all.

        Args:
          folder: to write; an older one of this kind is replaced.
          header: what JSON can hold, besides the version.
          name: file name of the arrays, which ends in .safetensors or .npz.
          arrays: by name.

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
        """Writes the header alone, whole or not at all; see `write`."""
        text = json.dumps({self.version_name: self.version, **header}, indent=2) + "\n"
        with files.replacing_file(as_path(folder) / self.marker) as path:
            path.write_text(text, encoding="utf-8")

    def read_header(
        self,
        folder: str | os.PathLike[str],
        fields: Mapping[str, type | UnionType] | None = None,
    ) -> dict[str, Any]:
        """Reads the header.

        Args:
          folder: of the artifact.
          fields: fields that it must have, and their types.

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
                    "interrupted, or has not ended; run the command that writes it "
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
        """Reports whatever is wrong with a file as a `UserError`."""
        try:
            yield
        except _DAMAGE as error:
            raise self.damaged(path, error) from error

    def damaged(self, path: str | os.PathLike[str], reason: object) -> UserError:
        """The error of a file that is missing, damaged or of another artifact."""
        # numpy adds lines of advice that is not for users.
        text = str(reason).strip().partition("\n")[0] or type(reason).__name__
        return UserError(f"cannot read {path} ({text.rstrip('.')}): {self.remedy}.")


def read_tensors(path: pathlib.Path) -> tuple[dict[str, np.ndarray], str]:
    """Reads a safetensors file.

    Returns:
      The arrays by name, and an identity of the file: 16 hexadecimal digits.

    Raises:
      OSError, SafetensorError: it cannot be read, or is damaged.
    """
    tensors = load_file(path)
    with path.open("rb") as file:
        return tensors, hashlib.file_digest(file, "sha256").hexdigest()[:16]
