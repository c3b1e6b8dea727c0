"""Artifacts: folders with a JSON header and arrays, whose reader trusts neither.

docs/architecture.md lists the kinds. The header has the kind, the version of the format
and a fingerprint of the arrays or of the model that they belong to. The arrays are in a
safetensors file, in .npz files, or in .npy files that are mapped into memory. Nothing
is unpickled, and all faults are reported as a `UserError` with the file, the reason and
the remedy.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.storage import files, folders
from bpd_jax.storage.paths import as_path
from bpd_jax.storage.tensors import write_tensors

SAFETENSORS = ".safetensors"


@dataclasses.dataclass(frozen=True)
class Artifact(folders.FolderKind):
    """A kind of artifact; see `FolderKind`, whose `marker` is the header.

    Attributes:
      remedy: how to obtain such a folder, for error messages.
      version: version of the format.
    """

    remedy: str = "get the folder again"
    version: int = 1

    def write(
        self,
        folder: str | os.PathLike[str],
        header: Mapping[str, Any],
        name: str,
        arrays: Mapping[str, np.ndarray],
        *,
        packed: bool = False,
    ) -> None:
        """Writes a folder with one file of arrays atomically.

        `name` ends in .safetensors, which may be packed, or .npz. The kind and the
        version are added to the header.
        """
        with folders.replacing_folder(folder, self) as temporary:
            if name.endswith(SAFETENSORS):
                write_tensors(temporary / name, arrays, packed=packed)
            else:
                np.savez(temporary / name, **dict[str, Any](arrays))
            self.write_header(temporary, header)

    def write_header(
        self, folder: str | os.PathLike[str], header: Mapping[str, Any]
    ) -> None:
        """Writes only the header, atomically; see `write`."""
        content = {"artifact": self.title, "version": self.version, **header}
        files.write_json(as_path(folder) / self.marker, content)

    def read_header(
        self,
        folder: str | os.PathLike[str],
        fields: Mapping[str, type | UnionType] | None = None,
    ) -> dict[str, Any]:
        """Reads the header; `fields` are required, with their types."""
        path = as_path(folder) / self.marker
        try:
            header = files.read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{folder} does not hold {self.title}: {path} is missing; "
                f"{self.remedy}."
            ) from None
        except (OSError, ValueError) as error:
            raise self.damaged(path, error) from error
        with self.reading(path):
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
            raise self.damaged(path, error) from error

    def damaged(self, path: str | os.PathLike[str], reason: object) -> UserError:
        """The error for a file that is missing, damaged or of another artifact."""
        # numpy's messages have further lines, which are for programmers.
        text = str(reason).strip().partition("\n")[0] or type(reason).__name__
        return UserError(f"cannot read {path} ({text.rstrip('.')}): {self.remedy}.")
