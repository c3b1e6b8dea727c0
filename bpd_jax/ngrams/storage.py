"""A folder of numpy arrays with a header that notices truncation and damage.

ngram_model.json     magic, version, checksum of what follows; settings; and per
                     array its dtype, shape and CRC-32
keys_1.npy ...       one file per array, in numpy's own format

Counts are kept in the same way, under a header `ngram_counts.json`.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bpd_jax import folders
from bpd_jax.errors import UserError

_VERSION = 1


class _Kind(NamedTuple):
    header: str
    title: str
    remedy: str

    @property
    def magic(self) -> str:
        return f"bpd_jax {self.title.removeprefix('an ')}"


_KINDS = {
    "model": _Kind("ngram_model.json", "an n-gram model", "build the model again"),
    "counts": _Kind("ngram_counts.json", "n-gram counts", "count again"),
}
HEADER = _KINDS["model"].header
COUNTS_HEADER = _KINDS["counts"].header
# A model also has the files that other programs read, see `bpd_jax.ngrams.build`.
_OTHERS = {"model": ("model.arpa.gz", "model.fst", "symbols.txt"), "counts": ()}
KINDS = {
    name: folders.FolderKind(
        kind.title,
        kind.header,
        ("*_[0-9].npy", "*_[0-9][0-9].npy", *_OTHERS[name]),
        kind.magic,
    )
    for name, kind in _KINDS.items()
}


def write_folder(
    folder: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
    *,
    kind: str = "model",
) -> None:
    """Writes `folder` anew; it appears as a whole or not at all.

    Args:
      folder: the folder.
      arrays: by name.
      settings: what JSON can hold.
      kind: `model` or `counts`; the one is not read as the other.
    """
    with folders.replacing_folder(folder, KINDS[kind]) as temporary:
        write_arrays(temporary, arrays, settings, kind=kind)


def write_arrays(
    folder: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
    *,
    kind: str = "model",
) -> None:
    """Writes the arrays and then the header into a folder that exists."""
    folder = pathlib.Path(folder)
    described = {}
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        try:
            np.save(folder / f"{name}.npy", array)
        except OSError as error:
            if error.errno is not None:
                raise
            # numpy says only how much of the array it wrote.
            raise OSError(f"{error}; the disk may be full") from error
        described[name] = {
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "crc32": zlib.crc32(array.data) if array.size else 0,
        }
    content = {"settings": dict(settings), "arrays": described}
    header = {
        "magic": _KINDS[kind].magic,
        "version": _VERSION,
        "crc32": _content_checksum(content),
        **content,
    }
    text = json.dumps(header, indent=2) + "\n"
    (folder / _KINDS[kind].header).write_text(text, encoding="utf-8")


def read_folder(
    folder: str | os.PathLike[str], *, verify: bool, kind: str = "model"
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads what `write_folder` wrote; the arrays are memory-mapped, read only.

    Raises:
      UserError: a file is missing, cut short, changed (with `verify`) or foreign.
    """
    folder = pathlib.Path(folder)
    header_path, remedy = folder / _KINDS[kind].header, _KINDS[kind].remedy
    header = _read_header(header_path, _KINDS[kind])
    arrays = {}
    for name, about in header["arrays"].items():
        path = folder / f"{name}.npy"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} is missing, cut short or not an array ({error}): {remedy}."
            ) from error
        same = array.dtype.str == about["dtype"] and list(array.shape) == about["shape"]
        if same and verify and array.size:
            same = zlib.crc32(array.data) == about["crc32"]
        if not same:
            raise UserError(
                f"{path} is not the array that {header_path} describes: {remedy}."
            )
        # Still the mapped file, without the slow indexing of the class np.memmap.
        arrays[name] = np.asarray(array)
    return arrays, header["settings"]


def _read_header(path: pathlib.Path, kind: _Kind) -> dict[str, Any]:
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror or error}): give a folder that holds "
            f"{kind.title}."
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): {kind.remedy}.") from error
    if not isinstance(header, dict) or header.get("magic") != kind.magic:
        raise UserError(f"{path} is not the header of {kind.title} of bpd_jax.")
    if header.get("version") != _VERSION:
        raise UserError(
            f"{path} has format {header.get('version')}, this program reads "
            f"{_VERSION}: {kind.remedy}."
        )
    if header.get("crc32") != _content_checksum(header):
        raise UserError(f"{path} is damaged: {kind.remedy}.")
    return header


def _content_checksum(header: Mapping[str, Any]) -> int:
    content = [header.get(name) for name in ("settings", "arrays")]
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
