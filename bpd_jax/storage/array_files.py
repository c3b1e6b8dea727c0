"""Writes array files; reads and validates them, because they may be damaged or forged.

An `ArraySpec` declares the requirements on an array. The header of a file is compared
with its size before anything is allocated. All faults raise an `OSError` or a
`ValueError`; the caller adds the name of the file and the remedy.
"""

import contextlib
import dataclasses
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import IO, Any

import numpy as np

from bpd_jax.storage import files
from bpd_jax.storage.buckets import as_path

# Exceptions of numpy and zipfile for damaged files, besides OSError and ValueError.
DAMAGE = (
    EOFError,
    KeyError,
    MemoryError,
    NotImplementedError,
    OverflowError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    TypeError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
_BLOCK = 1 << 20  # Number of elements that are checked together.
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The requirements on an array.

    Attributes:
      dtypes: allowed dtypes as in `np.dtype.str`, such as `<i8`.
      shape: size of every axis; None for any size.
      low: minimum of all elements.
      high: maximum of all elements.
      finite: whether infinities are refused; NaN is always refused.
      increasing: whether the elements of a vector must be strictly increasing.
    """

    dtypes: tuple[str, ...]
    shape: tuple[int | None, ...]
    low: float | None = None
    high: float | None = None
    finite: bool = True
    increasing: bool = False

    def check_header(self, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        """Raises a `ValueError` unless dtype and shape are allowed."""
        if dtype.str not in self.dtypes:
            raise ValueError(f"its dtype is {dtype}, not {' or '.join(self.dtypes)}")
        matches = len(shape) == len(self.shape) and all(
            expected in (None, size)
            for expected, size in zip(self.shape, shape, strict=True)
        )
        if not matches:
            expected = ["any" if size is None else size for size in self.shape]
            raise ValueError(f"its shape is {list(shape)}, not {expected}")

    def check(self, array: np.ndarray) -> None:
        """Raises a `ValueError` unless an array meets all requirements."""
        self.check_header(array.dtype, array.shape)
        flat = array.reshape(-1)
        for begin in range(0, flat.size, _BLOCK):
            self._check_values(flat[begin : begin + _BLOCK])
            if self.increasing:
                # The last element of the previous block is compared as well.
                part = flat[max(begin - 1, 0) : begin + _BLOCK]
                if not (part[1:] > part[:-1]).all():
                    raise ValueError("its elements do not increase")

    def _check_values(self, values: np.ndarray) -> None:
        if values.dtype.kind == "f":
            if np.isnan(values).any():
                raise ValueError("it contains NaN")
            if self.finite and np.isinf(values).any():
                raise ValueError("it contains an infinite number")
        if self.low is not None and values.min() < self.low:
            raise ValueError(f"it contains {values.min()}, which is below {self.low}")
        if self.high is not None and values.max() > self.high:
            raise ValueError(f"it contains {values.max()}, which is above {self.high}")


def check_names(names: Collection[str], expected: Collection[str]) -> None:
    """Raises a `ValueError` unless the names of arrays are the expected ones."""
    for name in sorted(set(names) ^ set(expected)):
        problem = "is missing" if name in expected else "is unknown"
        raise ValueError(f"the array {name[:80]!r} {problem}")


def check_shapes(
    arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises a `ValueError` unless the arrays have these names and shapes."""
    check_names(arrays, shapes)
    for name, shape in shapes.items():
        if arrays[name].shape != tuple(shape):
            raise ValueError(
                f"{name}: its shape is {list(arrays[name].shape)}, not {list(shape)}"
            )


def open_npy(path: str | os.PathLike[str]) -> np.ndarray:
    """Maps a .npy file into memory, read-only.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is invalid or truncated, or contains Python objects.
    """
    with _damage_as_value_error():
        return np.load(path, mmap_mode="r", allow_pickle=False)


def write_npz(path: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
    """Writes an uncompressed .npz file, atomically.

    Args:
      path: the file; an older one is replaced only when the new one is complete.
      arrays: arrays, numbers or strings by name.

    Raises:
      UserError: the file cannot be written.
    """
    with files.replacing_file(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)


def read_npz(
    path: str | os.PathLike[str],
    specs: Mapping[str, ArraySpec] | None = None,
    optional: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Reads an uncompressed .npz file, as `write_npz` writes.

    Args:
      path: the file.
      specs: requirements by name of an array; None accepts all arrays.
      optional: names in `specs` of arrays that may be missing.

    Returns:
      The arrays by name; their checksums have been verified.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is damaged, or an array does not meet its requirements.
    """
    arrays = {}
    with _damage_as_value_error(), zipfile.ZipFile(as_path(path)) as archive:
        members = {
            info.filename.removesuffix(".npy"): info for info in archive.filelist
        }
        if len(members) != len(archive.filelist):
            raise ValueError("two arrays have the same name")
        if specs is not None:
            check_names({*members, *optional}, specs)
        for name, info in members.items():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"the array {name[:80]!r} is compressed")
            with archive.open(info) as stream:
                spec = None if specs is None else specs[name]
                try:
                    arrays[name] = _read_array(stream, info.file_size, spec)
                except ValueError as error:
                    raise ValueError(f"{name[:80]}: {error}") from error
    return arrays


def _read_array(stream: IO[bytes], size: int, spec: ArraySpec | None) -> np.ndarray:
    """Reads a member of `size` bytes to its end, where its checksum is verified."""
    version = np.lib.format.read_magic(stream)
    if version not in _HEADER_READERS:
        raise ValueError(f"version {version} of .npy files is not supported")
    shape, fortran, dtype = _HEADER_READERS[version](stream)
    if dtype.hasobject or fortran:
        raise ValueError("it contains Python objects, or is in column-major order")
    if spec is not None:
        spec.check_header(dtype, shape)
    needed = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or needed != size - stream.tell():
        raise ValueError("its shape does not match its size")
    data = bytearray(stream.read())
    if len(data) != needed:
        raise ValueError("it is truncated")
    array = (
        np.frombuffer(data, dtype).reshape(shape) if needed else np.zeros(shape, dtype)
    )
    if spec is not None:
        spec.check(array)
    return array


@contextlib.contextmanager
def _damage_as_value_error() -> Iterator[None]:
    try:
        yield
    except (*DAMAGE, ValueError) as error:
        # Further lines of numpy's messages advise programmers.
        line = str(error).strip().partition("\n")[0]
        raise ValueError(line or type(error).__name__) from error


def spec_like(leaf: Any) -> ArraySpec:
    """The requirements on an array that replaces `leaf`; floats must be finite."""
    return ArraySpec((np.dtype(leaf.dtype).str,), tuple(leaf.shape))
