"""A folder of numpy arrays with a header that detects truncation and damage.

ngram_model.json     magic, version, checksum of what follows; settings; and per
                     array its dtype, shape and CRC-32
keys_1.npy ...       one file per array, in numpy's own format

Counts are kept in the same way, under a header `ngram_counts.json`.
"""

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from bpd_jax import array_files, folders
from bpd_jax.artifacts import Artifact
from bpd_jax.buckets import as_path
from bpd_jax.ngrams import trie

# The arrays of each kind, with the number of highest orders that lack them.
_GROUPS = {
    "model": {"keys": 0, "log_probs": 0, "log_backoffs": 1},
    "counts": {"keys": 0, "counts": 0, "followed": 1},
}
_FLOATS = array_files.ArraySpec(("<f8",), (None,))
_VALUES = {
    # Rounding may leave a probability a little above 1; that of `<s>` is 0.
    "log_probs": dataclasses.replace(_FLOATS, high=0.01, finite=False),
    "log_backoffs": _FLOATS,
    "counts": array_files.ArraySpec(("<i8",), (None,), low=1),
    "followed": dataclasses.replace(_FLOATS, low=0),
}
HEADER, COUNTS_HEADER = "ngram_model.json", "ngram_counts.json"
_ARRAYS = ("*_[0-9].npy", "*_[0-9][0-9].npy")
KINDS = {
    "model": Artifact(
        "an n-gram model",
        HEADER,
        # A model also has the files that other programs read, see `ngrams.build_model`.
        (*_ARRAYS, "model.arpa.gz", "model.fst", "symbols.txt"),
        "bpd_jax n-gram model",
        remedy="build the model again",
        version_name="version",
    ),
    "counts": Artifact(
        "n-gram counts",
        COUNTS_HEADER,
        _ARRAYS,
        "bpd_jax n-gram counts",
        remedy="count again",
        version_name="version",
    ),
}


def write_folder(
    folder: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
    *,
    kind: str = "model",
) -> None:
    """Writes or replaces `folder` atomically.

    Args:
      folder: the folder.
      arrays: arrays by name.
      settings: JSON values.
      kind: `model` or `counts`; one is not read as the other.
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
    folder = as_path(folder)
    described = {}
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        try:
            np.save(folder / f"{name}.npy", array)
        except OSError as error:
            if error.errno is not None:
                raise
            # numpy's message only states how much of the array it wrote.
            raise OSError(f"{error}; the disk may be full") from error
        described[name] = {
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "crc32": zlib.crc32(array.data) if array.size else 0,
        }
    content = {"settings": dict(settings), "arrays": described}
    checksum = {"magic": KINDS[kind].text, "crc32": _content_checksum(content)}
    KINDS[kind].write_header(folder, checksum | content)


def read_folder(
    folder: str | os.PathLike[str], *, verify: bool, kind: str = "model"
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads what `write_folder` wrote; the arrays are memory-mapped, read only.

    Raises:
      UserError: a file is missing, cut short, changed (with `verify`) or foreign.
    """
    folder, artifact = as_path(folder), KINDS[kind]
    fields = {"magic": str, "crc32": int, "settings": dict, "arrays": dict}
    header = artifact.read_header(folder, fields)
    settings, described = header["settings"], header["arrays"]
    with artifact.reading(folder / artifact.marker):
        if header["magic"] != artifact.text:
            raise ValueError(f"it is not the header of {artifact.title} of bpd_jax")
        if header["crc32"] != _content_checksum(header):
            raise ValueError("its checksum does not fit")
        _check_settings(settings, described)
        array_files.check_names(described, _names(kind, settings["order"]))
    arrays: dict[str, np.ndarray] = {}
    for name in _names(kind, settings["order"]):
        about, path = described[name], folder / f"{name}.npy"
        with artifact.reading(path):
            array = array_files.open_npy(path)
            same = (array.dtype.str, list(array.shape)) == (
                about.get("dtype"),
                about.get("shape"),
            )
            if same and verify and array.size:
                checksum = zlib.crc32(np.ascontiguousarray(array).data)
                same = checksum == about.get("crc32")
            if not same:
                raise ValueError(
                    f"it is not the array that {artifact.marker} describes"
                )
            spec = _spec(name, settings["vocab_size"], arrays)
            spec.check_header(array.dtype, array.shape)
            if verify:
                spec.check(array)
        # Still the mapped file, without the slow indexing of the class np.memmap.
        arrays[name] = np.asarray(array)
    return arrays, settings


def _check_settings(settings: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Raises a `ValueError` unless the settings can be those of a trie."""
    limits = {
        "order": (1, len(described)),
        "vocab_size": (1, trie.MOST_TOKENS),
        "end_of_text": (0, trie.MOST_TOKENS),
    }
    for name, (low, high) in limits.items():
        value = settings.get(name, "missing")
        if name == "end_of_text" and value is None:
            continue
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} is {str(value)[:40]}")
    seen = settings.get("seen", [])
    if not isinstance(seen, list) or any(type(n) is not int or n < 0 for n in seen):
        raise ValueError("seen must be a list of non-negative integers")


def _names(kind: str, order: int) -> list[str]:
    """The arrays of a folder, keys first and low orders first."""
    return [
        f"{group}_{number}"
        for group, fewer in _GROUPS[kind].items()
        for number in range(1, order + 1 - fewer)
    ]


def _spec(
    name: str, vocab_size: int, arrays: Mapping[str, np.ndarray]
) -> array_files.ArraySpec:
    """The required shape of an array, given those that were read before it."""
    group, _, order = name.rpartition("_")
    if group != "keys":
        return dataclasses.replace(
            _VALUES[group], shape=(arrays[f"keys_{order}"].size,)
        )
    histories = arrays[f"keys_{int(order) - 1}"].size if int(order) > 1 else 1
    highest = histories * trie.symbol_width(vocab_size) - 1
    return array_files.ArraySpec(("<i8",), (None,), 0, highest, increasing=True)


def _content_checksum(header: Mapping[str, Any]) -> int:
    content = [header.get(name) for name in ("settings", "arrays")]
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
