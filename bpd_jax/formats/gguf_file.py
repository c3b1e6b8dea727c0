"""A GGUF file, read with the package gguf, one tensor at a time.

The package trusts the lengths in a file. Here every length is compared with the
remaining bytes before anything is allocated, so that a damaged file raises a
`UserError` and never takes more memory than a small multiple of its size.
"""

import itertools
import math
import mmap
import os
import pathlib
import struct
from typing import Any, TypeAlias, TypeVar

import gguf
import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.formats.gguf_blocks import quantized_matrix
from bpd_jax.models.quantized import QuantizedMatrix
from bpd_jax.storage.paths import as_path, local_copy

Value: TypeAlias = int | float | bool | str | np.ndarray | list[str]
_T = TypeVar("_T", int, float, bool, str, np.ndarray, list)

# Far above the counts of any model; the size of a large file is no sufficient limit.
_MOST_VALUES = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_TEXTS = 1 << 22
_MOST_DIMENSIONS = 4

# Exceptions of the package and of NumPy for damaged files.
_DAMAGE = (
    *(ArithmeticError, LookupError, MemoryError, TypeError, ValueError),
    struct.error,
)

# Elements dequantised at once, which takes a few times their memory.
_CHUNK_ELEMENTS = 1 << 20

_ARRAY, _STRING = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING
_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    np.ndarray: "an array of numbers",
    list: "an array of strings",
}


class _Reader(gguf.GGUFReader):
    """The reader of the package, limited to the bytes of the file.

    The package itself truncates data beyond the end of a file, and makes several arrays
    of each element of an array: for the header of SmolLM2 (147,000 strings and numbers)
    it takes 20 times as long.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._texts = 0
        # An offset that overflows raises an error instead of wrapping around.
        with np.errstate(over="raise"):
            super().__init__(path)

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None
    ) -> np.ndarray:
        del override_order  # Big-endian files have been refused before.
        return np.frombuffer(self.data, dtype, int(count), int(offset))

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[gguf.GGUFValueType]]:
        if raw_type != _ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        begin = int(orig_offs) + 12
        if kind in self.gguf_scalar_to_np:
            numbers = self._get(begin, self.gguf_scalar_to_np[kind], count)
            return 12 + numbers.nbytes, [numbers], [0], [_ARRAY, kind]
        self._texts += count
        if kind != _STRING or self._texts > _MOST_TEXTS:
            raise ValueError(f"an array has {count:,} elements of type {kind.name}")
        # Hundreds of thousands: an array of each would take a second.
        header, texts, end = memoryview(self.data), [], begin
        for _ in range(count):
            [size] = struct.unpack_from("<Q", header, end)
            texts.append(str(header[end + 8 : end + 8 + size], "utf-8"))
            end += 8 + size
            if end > len(header):
                raise ValueError("a string goes beyond the end of the file")
        return end - int(orig_offs), texts, [0], [_ARRAY, kind]


class GGUFFile:
    """Values and tensors of a GGUF file.

    Attributes:
      path: the file.
      tensors: the package's descriptions of the tensors, by name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens the file and checks its whole header; reads no tensor."""
        self.path = as_path(path)
        _check_start(self.path)
        try:
            reader = _Reader(local_copy(self.path))
            self._values = {
                name: _value(field) for name, field in reader.fields.items()
            }
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._mapped: mmap.mmap = reader.data._mmap
            _check_tensors(reader)
        except _DAMAGE as error:
            raise UserError(
                f"{path} is truncated or damaged, or needs a newer version of the "
                f"package gguf ({error}): download the file again."
            ) from error
        parts = self.find("split.count", int) or 1
        if parts > 1:
            raise UserError(
                f"{path} is one of {parts} parts of a model: merge them first, with "
                "llama-gguf-split --merge."
            )
        for kind, name in {t.tensor_type: n for n, t in self.tensors.items()}.items():
            block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
            try:
                gguf.quants.dequantize(block, kind)
            except NotImplementedError:
                raise UserError(
                    f"{self.path}: tensor {name!r} is of type {kind.name}, which "
                    "cannot be read: quantise the model to another type, such as Q8_0."
                ) from None

    def find(self, key: str, kind: type[_T]) -> _T | None:
        """Returns a value, or None if the file does not have this key.

        The kind is int, float, bool, str, np.ndarray (of numbers) or list (of str).
        """
        value = self._values.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"{self.path}: {key} must be {_WORDS[kind]}.")
        return value

    def starting_with(self, prefix: str) -> dict[str, Value]:
        """Returns the values whose names begin with `prefix`, without it."""
        names = [name for name in self._values if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._values[name] for name in names}

    def get(self, key: str, kind: type[_T]) -> _T:
        """Returns a required value."""
        value = self.find(key, kind)
        if value is None:
            raise UserError(f"{self.path} lacks {key}: convert the model again.")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the row-major shape of a tensor: the last axis is contiguous."""
        return tuple(reversed(self._tensor(name).shape.tolist()))

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32, dequantised."""
        tensor, shape = self._tensor(name), self.shape(name)
        raw = tensor.data.reshape(math.prod(shape[:-1]), -1)
        result = np.empty((len(raw), shape[-1]), np.float32)
        step = max(1, _CHUNK_ELEMENTS // shape[-1])
        for start in range(0, len(raw), step):
            part = slice(start, start + step)
            result[part] = gguf.quants.dequantize(raw[part], tensor.tensor_type)
            self._check_finite(name, result[part])
        self._forget(tensor)
        return result.reshape(shape)

    def quantized(self, name: str) -> QuantizedMatrix | None:
        """A tensor in its blocks, one row after another; None if it has none."""
        tensor, shape = self._tensor(name), self.shape(name)
        raw = tensor.data.reshape(math.prod(shape[:-1]), -1)
        matrix = quantized_matrix(raw, tensor.tensor_type)
        if matrix is not None:
            self._check_finite(name, matrix.scales, matrix.minima)
        self._forget(tensor)
        return matrix

    def _check_finite(self, name: str, *arrays: np.ndarray | None) -> None:
        if not all(np.isfinite(x).all() for x in arrays if x is not None):
            raise UserError(
                f"{self.path} is damaged: tensor {name} has numbers that are "
                "not finite."
            )

    def _forget(self, tensor: Any) -> None:
        """Frees the memory of a tensor's pages, which can be read again."""
        begin = -(-tensor.data_offset // mmap.PAGESIZE) * mmap.PAGESIZE
        size = tensor.data_offset + tensor.n_bytes - begin
        if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED, begin, size)

    def _tensor(self, name: str) -> Any:
        if name not in self.tensors:
            raise UserError(f"{self.path} has no tensor {name}: convert it again.")
        return self.tensors[name]


def _check_start(path: pathlib.Path) -> None:
    """Checks magic, version and counts, which the package does not check."""
    try:
        with path.open("rb") as stream:
            start = stream.read(24).ljust(24, b"\0")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    magic, version, num_tensors, num_values = struct.unpack("<4sIQQ", start)
    if magic != b"GGUF" or version not in (2, 3):
        raise UserError(
            f"{path} is not a GGUF file of version 2 or 3 for little-endian machines: "
            "convert the model again."
        )
    if num_tensors > _MOST_TENSORS or num_values > _MOST_VALUES:
        raise UserError(
            f"{path} is damaged: it cannot have {num_tensors:,} tensors and "
            f"{num_values:,} values; download the file again."
        )


def _value(field: gguf.ReaderField) -> Value:
    if field.types[0] == _ARRAY:
        # Of strings, the parts after those of the name are the strings.
        is_text = field.types[-1] == _STRING
        return field.parts[field.data[0] :] if is_text else field.parts[field.data[0]]
    if field.types[0] == gguf.GGUFValueType.FLOAT32:
        # A float32 that was written as 1e-5 is read as 1e-5.
        return float(str(field.parts[field.data[0]][0]))
    value: Value = field.contents()
    return value


def _check_tensors(reader: _Reader) -> None:
    """Raises a `ValueError` for impossible shapes and overlapping tensors."""
    for tensor in reader.tensors:
        shape = tensor.shape.tolist()
        if not 1 <= len(shape) <= _MOST_DIMENSIONS or 0 in shape:
            raise ValueError(f"tensor {tensor.name!r} has shape {shape}")
        if tensor.data_offset % reader.alignment:
            raise ValueError(f"tensor {tensor.name!r} is not aligned")
    ordered = sorted(reader.tensors, key=lambda tensor: tensor.data_offset)
    for one, other in itertools.pairwise(ordered):
        if one.data_offset + one.n_bytes > other.data_offset:
            raise ValueError(f"tensors {one.name!r} and {other.name!r} overlap")
