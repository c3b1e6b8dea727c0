"""Reading arrays that may be damaged or forged, before any kernel sees them.

What an array must be like is declared as an `ArraySpec`. Nothing is allocated before
the header of a file fits its size, and whatever is wrong is an `OSError` or a
`ValueError`, whose reader says which file it is and what to do.
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

from bpd_jax.buckets import as_path

# What numpy and zipfile raise besides OSError and ValueError when bytes are damaged.
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
_BLOCK = 1 << 20  # elements looked at together
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """What an array must be like.

    Attributes:
      dtypes: the kinds that it may have, as in `np.dtype.str`, such as `<i8`.
      shape: of every axis, or None for any length.
      low: no element is below this.
      high: no element is above this.
      finite: whether infinities are refused. NaN always is.
      increasing: whether each element must be above the one before (axis 0 of one).
    """

    dtypes: tuple[str, ...]
    shape: tuple[int | None, ...]
    low: float | None = None
    high: float | None = None
    finite: bool = True
    increasing: bool = False

    def check_header(self, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        """Raises a `ValueError` unless kind and shape are as declared."""
        if dtype.str not in self.dtypes:
            raise ValueError(f"it is of {dtype} and not of {' or '.join(self.dtypes)}")
        fits = len(shape) == len(self.shape) and all(
            wanted in (None, size)
            for wanted, size in zip(self.shape, shape, strict=True)
        )
        if not fits:
            wanted = ["any" if size is None else size for size in self.shape]
            raise ValueError(f"its shape is {list(shape)} and not {wanted}")

    def check(self, array: np.ndarray) -> None:
        """Raises a `ValueError` unless all of an array is as declared."""
        self.check_header(array.dtype, array.shape)
        flat = array.reshape(-1)
        for begin in range(0, flat.size, _BLOCK):
            self._check_values(flat[begin : begin + _BLOCK])
            if self.increasing:
                # One element of the block before belongs to this block's order.
                part = flat[max(begin - 1, 0) : begin + _BLOCK]
                if not (part[1:] > part[:-1]).all():
                    raise ValueError("its elements do not increase")

    def _check_values(self, values: np.ndarray) -> None:
        if values.dtype.kind == "f":
            if np.isnan(values).any():
                raise ValueError("it holds NaN")
            if self.finite and np.isinf(values).any():
                raise ValueError("it holds an infinite number")
        if self.low is not None and values.min() < self.low:
            raise ValueError(f"it holds {values.min()}, which is below {self.low}")
        if self.high is not None and values.max() > self.high:
            raise ValueError(f"it holds {values.max()}, which is above {self.high}")


def check_names(found: Collection[str], wanted: Collection[str]) -> None:
    """Raises a `ValueError` unless both have the same names."""
    for name in sorted(set(found) ^ set(wanted)):
        problem = "is missing" if name in wanted else "is not known"
        raise ValueError(f"the array {name[:80]!r} {problem}")


def check_shapes(
    arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises a `ValueError` unless the arrays have these names and shapes."""
    check_names(arrays, shapes)
    for name, shape in shapes.items():
        if arrays[name].shape != tuple(shape):
            raise ValueError(
                f"{name}: its shape is {list(arrays[name].shape)} and not {list(shape)}"
            )


def open_npy(path: str | os.PathLike[str]) -> np.ndarray:
    """Maps a .npy file, read only.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no such file, is cut short, or holds Python objects.
    """
    with _damage_told():
        return np.load(path, mmap_mode="r", allow_pickle=False)


def read_npz(
    path: str | os.PathLike[str],
    specs: Mapping[str, ArraySpec] | None = None,
    optional: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Reads an uncompressed .npz file, which is what `np.savez` writes.

    Args:
      path: the file.
      specs: what it must hold; None to take whatever arrays there are.
      optional: names in `specs` of arrays that may be missing.

    Returns:
      The arrays by name. Their checksums fit.

    Raises:
      OSError: it cannot be read.
      ValueError: it is damaged, or an array is not as declared.
    """
    arrays = {}
    with _damage_told(), zipfile.ZipFile(as_path(path)) as archive:
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
    """Reads a member of `size` bytes, to its end, where its checksum is compared."""
    version = np.lib.format.read_magic(stream)
    if version not in _HEADER_READERS:
        raise ValueError(f"version {version} of .npy files is not known")
    shape, fortran, dtype = _HEADER_READERS[version](stream)
    if dtype.hasobject or fortran:
        raise ValueError("it holds Python objects or columns")
    if spec is not None:
        spec.check_header(dtype, shape)
    needed = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or needed != size - stream.tell():
        raise ValueError("its shape does not fit its size")
    data = bytearray(stream.read())
    if len(data) != needed:
        raise ValueError("it is cut short")
    array = (
        np.frombuffer(data, dtype).reshape(shape) if needed else np.zeros(shape, dtype)
    )
    if spec is not None:
        spec.check(array)
    return array


@contextlib.contextmanager
def _damage_told() -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise ValueError(str(error) or type(error).__name__) from error


def spec_like(leaf: Any) -> ArraySpec:
    """What an array must be like that takes the place of `leaf`, finite if a float."""
    return ArraySpec((np.dtype(leaf.dtype).str,), tuple(leaf.shape))
