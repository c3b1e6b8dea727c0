"""Folders of numpy arrays, with a header that detects truncation and damage.

ngram_model.json     magic, version, checksum of the remaining fields; settings; dtype,
                     shape and CRC-32 of each array
keys_1.npy ...       one file per array, in numpy's format, which is mapped into memory

A compact folder has `arrays.safetensors` instead, a packed file with logarithms in half
precision: a fifth of the size or less, and read as a whole.

Folders of counts are the same, with the header `ngram_counts.json`.
"""

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from bpd_jax.base.reading import ArraySpec, check_names, open_npy
from bpd_jax.models.stored_tensors import read_tensors, write_tensors
from bpd_jax.ngrams import trie
from bpd_jax.storage import folders
from bpd_jax.storage.folders import Artifact
from bpd_jax.storage.paths import as_path, local_copy

# Requirements on values, of arrays that have the length of the keys.
INTEGERS = ArraySpec(("<i8",), (None,))
FLOATS = ArraySpec(("<f8",), (None,))

# The arrays of a compact folder.
PACKED = "arrays.safetensors"


def kind(noun: str, marker: str, remedy: str, *others: str) -> Artifact:
    """Returns the kind of a folder that may also contain the files `others`."""
    return Artifact(
        noun,
        marker,
        ("*_[0-9].npy", "*_[0-9][0-9].npy", PACKED, *others),
        f"bpd_jax {noun.removeprefix('an ')}",
        remedy=remedy,
    )


class NGramArrays:
    """Arrays with an entry per n-gram: the base of models and counts, as dataclasses.

    `bpd_jax.ngrams.trie` describes the layout.

    Attributes:
      vocab_size, keys, end_of_text: see `NGramModel`.
      kind: kind of the folder.
      values: requirements on the fields that have an array per order in addition to
        `keys`. There are two; the second lacks the highest order.
      settings: the other fields, which are JSON values.
    """

    vocab_size: int
    keys: trie.Keys
    end_of_text: int | None
    kind: ClassVar[Artifact]
    values: ClassVar[Mapping[str, ArraySpec]]
    settings: ClassVar[tuple[str, ...]] = ("vocab_size", "end_of_text")

    @property
    def width(self) -> int:
        """The number of symbols, V + 2."""
        return trie.symbol_width(self.vocab_size)

    @property
    def eos(self) -> int:
        """The symbol of `</s>`."""
        return trie.eos_symbol(self.vocab_size)

    @property
    def bos(self) -> int:
        """The symbol of `<s>`."""
        return trie.bos_symbol(self.vocab_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of n-grams per order, with `<s>` as a unigram, as in ARPA files."""
        return tuple(keys.size for keys in self.keys)

    def ngrams(self, order: int) -> np.ndarray:
        """Returns the symbols of all n-grams of `order`, `[n, order]` int32."""
        return trie.ngrams(self.keys, order, self.width)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes or replaces a folder atomically; equal arrays give equal bytes."""
        with folders.replacing_folder(folder, self.kind) as temporary:
            self.save_into(temporary)

    def save_into(self, folder: pathlib.Path, *, compact: bool = False) -> None:
        """Writes the files of `save` into an existing folder, which may have others.

        Args:
          compact: whether to write one packed file, which rounds logarithms to half
            precision (11 significant bits).
        """
        described = {}
        packed: dict[str, np.ndarray] = {}
        for group in self._lengths(0):
            for order, array in enumerate(getattr(self, group), start=1):
                array = np.ascontiguousarray(array)
                if compact:
                    rounded = array.astype("<f2") if array.dtype.kind == "f" else array
                    packed[f"{group}_{order}"] = rounded
                    array = rounded.astype(array.dtype)
                else:
                    _save(folder / f"{group}_{order}.npy", array)
                described[f"{group}_{order}"] = {
                    "dtype": array.dtype.str,
                    "shape": list(array.shape),
                    "crc32": zlib.crc32(array.data) if array.size else 0,
                }
        if compact:
            write_tensors(folder / PACKED, packed, packed=True)
        settings = {name: getattr(self, name) for name in self.settings}
        content = {
            "settings": {"order": len(self.keys), **settings},
            "arrays": described,
        }
        checksum = {"magic": self.kind.text, "crc32": _content_checksum(content)}
        self.kind.write_header(folder, checksum | content)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, verify: bool = True) -> Self:
        """Opens a folder written by `save`.

        The arrays are memory-mapped read-only, except those of a compact folder.

        Args:
          verify: whether to read all arrays once and verify their checksums and values;
            sizes are always verified.
        """
        folder = as_path(folder)
        fields = {"magic": str, "crc32": int, "settings": dict, "arrays": dict}
        header = cls.kind.read_header(folder, fields)
        settings, described = header["settings"], header["arrays"]
        with cls.kind.reading(folder / cls.kind.marker):
            if header["magic"] != cls.kind.text:
                raise ValueError(f"it is not the header of {cls.kind.title} of bpd_jax")
            if header["crc32"] != _content_checksum(header):
                raise ValueError("its checksum is wrong")
            _check_settings(settings, described)
            lengths = cls._lengths(settings["order"])
            names = [f"{name}_{i + 1}" for name, n in lengths.items() for i in range(n)]
            check_names(described, names)
        width = trie.symbol_width(settings["vocab_size"])
        packed = None
        if (folder / PACKED).is_file():
            with cls.kind.reading(folder / PACKED):
                packed, _ = read_tensors(folder / PACKED)
                check_names(packed, names)
        groups: dict[str, list[np.ndarray]] = {name: [] for name in lengths}
        keys = groups["keys"]
        for name, group in groups.items():
            for index in range(lengths[name]):
                if name == "keys":
                    highest = (keys[-1].size if keys else 1) * width - 1
                    spec = dataclasses.replace(
                        INTEGERS, low=0, high=highest, increasing=True
                    )
                else:
                    spec = dataclasses.replace(
                        cls.values[name], shape=(keys[index].size,)
                    )
                stem = f"{name}_{index + 1}"
                path = folder / (PACKED if packed else f"{stem}.npy")
                with cls.kind.reading(path):
                    array = packed[stem] if packed else open_npy(local_copy(path))
                    if packed and array.dtype == "<f2":
                        array = array.astype("<f8")
                    group.append(_checked(array, described[stem], spec, verify))
        return cls(
            **{name: tuple(group) for name, group in groups.items()},
            **{name: settings.get(name) for name in cls.settings},
        )

    @classmethod
    def _lengths(cls, order: int) -> dict[str, int]:
        """Returns the number of arrays of each field for N = `order`, keys first."""
        first, second = cls.values
        return {"keys": order, first: order, second: order - 1}


def _save(path: pathlib.Path, array: np.ndarray) -> None:
    try:
        np.save(path, array)
    except OSError as error:
        if error.errno is not None:
            raise
        # numpy's message states only how much of the array was written.
        raise OSError(f"{error}; the disk may be full") from error


def _checked(
    array: np.ndarray,
    described: Mapping[str, Any],
    spec: ArraySpec,
    verify: bool,
) -> np.ndarray:
    """Raises an error if an array does not match its description."""
    matches = array.dtype.str == described.get("dtype")
    matches &= list(array.shape) == described.get("shape")
    if matches and verify and array.size:
        checksum = zlib.crc32(np.ascontiguousarray(array).data)
        matches = checksum == described.get("crc32")
    if not matches:
        raise ValueError("it is not the array that the header describes")
    spec.check_header(array.dtype, array.shape)
    if verify:
        spec.check(array)
    # A view of the mapped file without the slow indexing of np.memmap.
    return np.asarray(array)


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


def _content_checksum(header: Mapping[str, Any]) -> int:
    content = [header.get(name) for name in ("settings", "arrays")]
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
