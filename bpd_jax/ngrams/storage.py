"""Folders of numpy arrays, with a header that detects truncation and damage.

ngram_model.json     magic, version, checksum of the remaining fields; settings; dtype,
                     shape and CRC-32 of each array
keys_1.npy ...       one file per array, in numpy's format

Folders of counts are the same, with the header `ngram_counts.json`.
"""

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax import array_files, folders
from bpd_jax.artifacts import Artifact
from bpd_jax.buckets import as_path
from bpd_jax.ngrams import trie

# The arrays of each kind, and the number of highest orders that lack them.
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


Groups = Mapping[str, Sequence[np.ndarray]]


def write_folder(
    folder: str | os.PathLike[str],
    groups: Groups,
    settings: Mapping[str, Any],
    *,
    kind: str = "model",
) -> None:
    """Writes or replaces `folder` atomically.

    Args:
      folder: the folder.
      groups: arrays per order by name, such as `keys`.
      settings: JSON values.
      kind: `model` or `counts`.
    """
    with folders.replacing_folder(folder, KINDS[kind]) as temporary:
        write_arrays(temporary, groups, settings, kind=kind)


def write_arrays(
    folder: str | os.PathLike[str],
    groups: Groups,
    settings: Mapping[str, Any],
    *,
    kind: str = "model",
) -> None:
    """Writes the arrays and then the header into an existing folder."""
    folder = as_path(folder)
    arrays = {
        f"{name}_{order}": array
        for name, group in groups.items()
        for order, array in enumerate(group, start=1)
    }
    settings = {"order": len(groups["keys"]), **settings}
    described = {}
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        try:
            np.save(folder / f"{name}.npy", array)
        except OSError as error:
            if error.errno is not None:
                raise
            # numpy's message states only how much of the array was written.
            raise OSError(f"{error}; the disk may be full") from error
        described[name] = {
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "crc32": zlib.crc32(array.data) if array.size else 0,
        }
    content = {"settings": settings, "arrays": described}
    checksum = {"magic": KINDS[kind].text, "crc32": _content_checksum(content)}
    KINDS[kind].write_header(folder, checksum | content)


def read_folder(
    folder: str | os.PathLike[str], *, verify: bool, kind: str = "model"
) -> tuple[dict[str, tuple[np.ndarray, ...]], dict[str, Any]]:
    """Reads a folder that `write_folder` wrote; the arrays are memory-mapped read-only.

    Args:
      folder: the folder.
      verify: whether to read all arrays once and verify their checksums and values;
        sizes are always verified.
      kind: `model` or `counts`.

    Returns:
      The arguments `groups` and `settings` of `write_folder`, and the order.

    Raises:
      UserError: a file is missing, truncated, changed or of another kind.
    """
    folder, artifact = as_path(folder), KINDS[kind]
    fields = {"magic": str, "crc32": int, "settings": dict, "arrays": dict}
    header = artifact.read_header(folder, fields)
    settings, described = header["settings"], header["arrays"]
    with artifact.reading(folder / artifact.marker):
        if header["magic"] != artifact.text:
            raise ValueError(f"it is not the header of {artifact.title} of bpd_jax")
        if header["crc32"] != _content_checksum(header):
            raise ValueError("its checksum is wrong")
        _check_settings(settings, described)
        array_files.check_names(described, _names(kind, settings["order"]))
    arrays: dict[str, np.ndarray] = {}
    for name in _names(kind, settings["order"]):
        description, path = described[name], folder / f"{name}.npy"
        with artifact.reading(path):
            array = array_files.open_npy(path)
            matches = (array.dtype.str, list(array.shape)) == (
                description.get("dtype"),
                description.get("shape"),
            )
            if matches and verify and array.size:
                checksum = zlib.crc32(np.ascontiguousarray(array).data)
                matches = checksum == description.get("crc32")
            if not matches:
                raise ValueError(
                    f"it is not the array that {artifact.marker} describes"
                )
            spec = _spec(name, settings["vocab_size"], arrays)
            spec.check_header(array.dtype, array.shape)
            if verify:
                spec.check(array)
        # A view of the mapped file without the slow indexing of np.memmap.
        arrays[name] = np.asarray(array)
    groups = {
        group: tuple(
            arrays[name] for name in arrays if name.rpartition("_")[0] == group
        )
        for group in _GROUPS[kind]
    }
    return groups, settings


def _check_settings(settings: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Raises a `ValueError` unless the settings are valid for a trie."""
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
    """The names of the arrays of a folder, keys first, in ascending order."""
    return [
        f"{group}_{number}"
        for group, fewer in _GROUPS[kind].items()
        for number in range(1, order + 1 - fewer)
    ]


def _spec(
    name: str, vocab_size: int, arrays: Mapping[str, np.ndarray]
) -> array_files.ArraySpec:
    """The required shape and values of an array, given the arrays read before it."""
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
