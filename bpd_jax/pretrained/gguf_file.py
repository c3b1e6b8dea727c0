"""A GGUF file, mapped into memory; its tensors are dequantised one at a time."""

import math
import mmap
import os
import pathlib
from types import ModuleType
from typing import TypeVar

import numpy as np

from bpd_jax.errors import UserError
from bpd_jax.pretrained.gguf_header import TensorEntry, read_header

_T = TypeVar("_T", int, float, bool, str, np.ndarray, list)

# Dequantised at once; each needs a few times as much while that lasts.
_CHUNK_ELEMENTS = 1 << 20

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    np.ndarray: "a list of numbers",
    list: "a list of texts",
}


class GGUFFile:
    """Values and tensors of a GGUF file.

    Attributes:
      path: of the file.
      tensors: where each lies, by name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens the file and checks its whole header; reads no tensor.

        Raises:
          UserError: it is missing, no GGUF file, damaged, a part of a model, or
            quantised in a way that cannot be read.
        """
        self.path = pathlib.Path(path)
        self._gguf = _import_gguf()
        kinds = self._gguf.GGMLQuantizationType
        sizes = {int(kind): size for kind, size in self._gguf.GGML_QUANT_SIZES.items()}
        try:
            with self.path.open("rb") as stream:
                # An empty file cannot be mapped.
                if not os.fstat(stream.fileno()).st_size:
                    raise UserError(f"{path} is empty: fetch the file again.")
                self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        header = read_header(self._data, str(path), sizes)
        self._values = header.values
        self.tensors = header.tensors
        parts = self.find("split.count", int) or 1
        if parts > 1:
            raise UserError(
                f"{path} is one of {parts} parts of a model: merge them first, with "
                "llama-gguf-split --merge."
            )
        for kind in {entry.kind for entry in self.tensors.values()}:
            block = np.zeros((1, sizes[kind][1]), np.uint8)
            try:
                self._gguf.quants.dequantize(block, kinds(kind))
            except NotImplementedError:
                name = next(n for n, e in self.tensors.items() if e.kind == kind)
                raise UserError(
                    f"{path}: tensor {name!r} is of type {kinds(kind).name}, which "
                    "cannot be read: quantise the model in another type, as Q8_0."
                ) from None

    def find(self, key: str, kind: type[_T]) -> _T | None:
        """Returns a value, or None if the file has none of this key.

        Args:
          key: its name.
          kind: int, float, bool, str, np.ndarray (of numbers) or list (of str).

        Raises:
          UserError: the value is of another kind.
        """
        value = self._values.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"{self.path}: {key} is not {_WORDS[kind]}.")
        return value

    def get(self, key: str, kind: type[_T]) -> _T:
        """Returns a value that every such file has.

        Raises:
          UserError: there is none, or it is of another kind.
        """
        value = self.find(key, kind)
        if value is None:
            raise UserError(f"{self.path} does not tell {key}: convert it again.")
        return value

    def entry(self, name: str) -> TensorEntry:
        """Returns where a tensor lies.

        Raises:
          UserError: the file has none of this name.
        """
        if name not in self.tensors:
            raise UserError(f"{self.path} has no tensor {name}: convert it again.")
        return self.tensors[name]

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32, dequantised.

        Raises:
          UserError: the file has none of this name.
        """
        entry = self.entry(name)
        kind = self._gguf.GGMLQuantizationType(entry.kind)
        rows = math.prod(entry.shape[:-1])
        raw = np.frombuffer(self._data, np.uint8, entry.size, entry.start)
        raw = raw.reshape(rows, -1)
        result = np.empty((rows, entry.shape[-1]), np.float32)
        step = max(1, _CHUNK_ELEMENTS // entry.shape[-1])
        for start in range(0, rows, step):
            part = raw[start : start + step]
            result[start : start + step] = self._gguf.quants.dequantize(part, kind)
        return result.reshape(entry.shape)


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            "GGUF files need the package gguf: pip install gguf."
        ) from error
    return gguf
