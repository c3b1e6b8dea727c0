"""A folder of numpy arrays with a header that notices truncation and damage.

ngram_model.json     magic, version, checksum of what follows; settings; and per
                     array its dtype, shape and CRC-32
keys_1.npy ...       one file per array, in numpy's own format
"""

import json
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from bpd_jax import files
from bpd_jax.errors import UserError

HEADER = "ngram_model.json"
_MAGIC = "bpd_jax n-gram model"
_VERSION = 1


def write_folder(
    folder: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
) -> None:
    """Writes `folder` anew; it appears as a whole or not at all."""
    with files.replacing_folder(folder) as temporary:
        write_arrays(temporary, arrays, settings)


def write_arrays(
    folder: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
) -> None:
    """Writes the arrays and then the header into a folder that exists."""
    folder = pathlib.Path(folder)
    described = {}
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        np.save(folder / f"{name}.npy", array)
        described[name] = {
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "crc32": zlib.crc32(array.data) if array.size else 0,
        }
    content = {"settings": dict(settings), "arrays": described}
    header = {
        "magic": _MAGIC,
        "version": _VERSION,
        "crc32": _content_checksum(content),
        **content,
    }
    text = json.dumps(header, indent=2) + "\n"
    (folder / HEADER).write_text(text, encoding="utf-8")


def read_folder(
    folder: str | os.PathLike[str], *, verify: bool
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads what `write_folder` wrote; the arrays are memory-mapped, read only.

    Raises:
      UserError: a file is missing, cut short, changed (with `verify`) or foreign.
    """
    folder = pathlib.Path(folder)
    header = _read_header(folder / HEADER)
    arrays = {}
    for name, about in header["arrays"].items():
        path = folder / f"{name}.npy"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} is missing, cut short or not an array ({error}): "
                "build the model again."
            ) from error
        same = array.dtype.str == about["dtype"] and list(array.shape) == about["shape"]
        if same and verify and array.size:
            same = zlib.crc32(array.data) == about["crc32"]
        if not same:
            raise UserError(
                f"{path} is not the array that {folder / HEADER} describes: "
                "build the model again."
            )
        # Still the mapped file, without the slow indexing of the class np.memmap.
        arrays[name] = np.asarray(array)
    return arrays, header["settings"]


def _read_header(path: pathlib.Path) -> dict[str, Any]:
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"there is no n-gram model here: cannot read {path} "
            f"({error.strerror or error})."
        ) from error
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({error}): build the model again."
        ) from error
    if not isinstance(header, dict) or header.get("magic") != _MAGIC:
        raise UserError(f"{path} is not the header of an n-gram model of bpd_jax.")
    if header.get("version") != _VERSION:
        raise UserError(
            f"{path} has format {header.get('version')}, this program reads "
            f"{_VERSION}: build the model again."
        )
    if header.get("crc32") != _content_checksum(header):
        raise UserError(f"{path} is damaged: build the model again.")
    return header


def _content_checksum(header: Mapping[str, Any]) -> int:
    content = [header.get(name) for name in ("settings", "arrays")]
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
