"""The tensors of safetensors files, as views of the mapped files.

A file is: the length n of the header, 8 bytes, little-endian; the header, n bytes of
JSON, `{name: {"dtype", "shape", "data_offsets"}}`; the data. Offsets count from the end
of the header. Everything is checked before any tensor is touched.
"""

import math
import mmap
import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from bpd_jax.errors import UserError
from bpd_jax.pretrained.json_files import Fields, parse_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Of a file, in bytes, where systems agree.
_LONGEST_NAME = 255
# The format's own limit.
_LONGEST_HEADER = 100_000_000

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    # Not of parameters, but files carry masks and positions too.
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_FLOATS = {_DTYPES[name] for name in ("F64", "F32", "F16", "BF16")}


class SafetensorsFolder:
    """The tensors of one checkpoint, in one file or several."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Opens the files and checks their headers; no tensor is read.

        Raises:
          UserError: there are none, or one is missing or damaged.
        """
        self._folder = pathlib.Path(folder)
        self._views: dict[str, np.ndarray] = {}
        for path in _find_files(self._folder):
            self._views.update(map_file(path))

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._views)

    def read(self, name: str) -> np.ndarray:
        """Returns a view of a tensor, read-only, in its own float type.

        Raises:
          UserError: it is missing, or not of floats.
        """
        view = self._view(name)
        if view.dtype not in _FLOATS:
            raise UserError(
                f"tensor {name} of {self._folder} is stored as {view.dtype}, not as "
                "floats: quantised safetensors cannot be read; get the original model."
            )
        return view

    def read_integers(self, name: str) -> np.ndarray:
        """Returns a view of a tensor, read-only, in its own integer type.

        Raises:
          UserError: it is missing, or not of integers.
        """
        view = self._view(name)
        if not np.issubdtype(view.dtype, np.integer):
            raise UserError(
                f"tensor {name} of {self._folder} is stored as {view.dtype}, not as "
                "integers: the file is damaged, or belongs to another model."
            )
        return view

    def _view(self, name: str) -> np.ndarray:
        if name not in self._views:
            raise UserError(
                f"{self._folder} has no tensor {name}: a file is missing, or its "
                "config.json is of another model."
            )
        return self._views[name]


def _find_files(folder: pathlib.Path) -> list[pathlib.Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
            raise UserError(
                f"{folder} has its tensors as pickled PyTorch files, which can run "
                f"code and are not read: convert them to {SINGLE}."
            )
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}.")
    names = set()
    for name in Fields.read(index).fields("weight_map").values.values():
        # Nothing outside the folder may be named.
        if (
            not isinstance(name, str)
            or pathlib.PurePath(name).name != (name or None)
            or len(os.fsencode(name)) > _LONGEST_NAME
        ):
            raise UserError(f"{index} names {name!r}, which is no file beside it.")
        names.add(name)
    for name in sorted(names):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} is incomplete: {name}, which {INDEX} names, is missing."
            )
    return [folder / name for name in sorted(names)]


def map_file(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the tensors of one file by name, as read-only views of it.

    Raises:
      UserError: it is missing, truncated or damaged.
    """
    path = pathlib.Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise _damaged(path, "it ends before its header")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error
    length = int.from_bytes(data[:8], "little")
    if length > _LONGEST_HEADER:
        raise _damaged(path, f"its header would have {length:,} bytes")
    begin = 8 + length
    if begin > size:
        raise _damaged(path, "it ends within its header")
    header = parse_object(data[8:begin], f"the header of {path}")
    header.pop("__metadata__", None)
    views = {}
    for name, entry in header.items():
        dtype, shape, offset = _check_entry(path, name, entry, size - begin)
        count = math.prod(shape)
        # An empty tensor may lie at the end, where there is no buffer to point into.
        place = begin + offset if count else 0
        views[name] = np.frombuffer(data, dtype, count, place).reshape(shape)
    return views


def _check_entry(
    path: pathlib.Path, name: str, entry: Any, room: int
) -> tuple[np.dtype, tuple[int, ...], int]:
    """The type, shape and first byte of a tensor, which lies within `room` bytes."""
    match entry:
        case {
            "dtype": str(kind),
            "shape": [*shape],
            "data_offsets": [int(first), int(last)],
        } if all(type(n) is int and n >= 0 for n in shape):
            pass
        case _:
            raise _damaged(path, f"its header does not describe {name!r}")
    if kind not in _DTYPES:
        raise UserError(
            f"tensor {name} of {path} is stored as {kind}, which cannot be read: get "
            "the original model."
        )
    if not 0 <= first <= last <= room:
        raise _damaged(
            path, f"{name!r} would lie at bytes {first:,} to {last:,} of {room:,}"
        )
    # An exact product: Python's integers do not overflow.
    if math.prod(shape) * _DTYPES[kind].itemsize != last - first:
        raise _damaged(path, f"the shape and the size of {name!r} do not agree")
    # NumPy has no array beyond either, even of no elements.
    if len(shape) > 32 or math.prod(n for n in shape if n) >= 2**56:
        raise _damaged(path, f"the shape of {name!r} is impossible")
    return _DTYPES[kind], tuple(shape), first


def _damaged(path: pathlib.Path, how: str) -> UserError:
    return UserError(f"{path} is damaged or incomplete: {how}; fetch it again.")
