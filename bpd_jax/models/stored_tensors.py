"""Safetensors files, whose arrays may be packed and stored in reduced precision.

A packed file is a safetensors file in which every array is a DEFLATE stream, `[n]`
uint8, and the metadata of the file have the dtypes and shapes. The bytes of all
elements are arranged by significance before they are compressed, because exponents
repeat and mantissas do not, and integers of several bytes are replaced by their
differences, because keys and token ids increase. This loses nothing: weights in
bfloat16 take two thirds of their size.

In reduced precision a matrix is int8, and the array NAME.scale has the step of each
channel, so that NAME is their product. With a coarse step most integers are small and
take 4 bits in a packed file.
"""

import hashlib
import json
import math
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from bpd_jax.base.reading import check_names, parse_json
from bpd_jax.storage.paths import local_copy

STORED_DTYPES = ("bfloat16", "float32", "int8", "compact")
SCALE = ".scale"
_PACKED = "packed"

# Step of `compact` relative to the root mean square of a channel.
_COARSE = 0.25

# A packed file may expand to so many times its size, and to 1 MiB in any case.
_MOST_EXPANSION = 64

_DTYPES = {np.dtype(name).name: np.dtype(name) for name in "bBhHiIlLefd?"}
_DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)


def write_tensors(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    *,
    packed: bool = False,
) -> None:
    """Writes arrays, not atomically; equal arrays give equal bytes."""
    if not packed:
        save_file(dict(arrays), path)
        return
    about = {
        name: " ".join([array.dtype.name, *map(str, array.shape)])
        for name, array in arrays.items()
    }
    streams = {name: _pack(array) for name, array in arrays.items()}
    # One entry, because safetensors writes several in any order.
    save_file(streams, path, {_PACKED: json.dumps(about)})


def read_tensors(path: pathlib.Path) -> tuple[dict[str, np.ndarray], str]:
    """The arrays of a file by name, unpacked, and 16 digits of the file's digest."""
    local = local_copy(path)
    arrays = load_file(local)
    with safe_open(local, "numpy") as file:
        metadata = file.metadata() or {}
    if _PACKED in metadata:
        about = parse_json(metadata[_PACKED].encode())
        check_names(about, arrays)
        left = _MOST_EXPANSION * os.path.getsize(local) + (1 << 20)
        for name, text in about.items():
            arrays[name] = _unpack(name, arrays[name], str(text), left)
            left -= arrays[name].nbytes
    return arrays, file_digest(path)[:16]


def file_digest(path: pathlib.Path) -> str:
    """The SHA-256 digest of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lowered(
    name: str, value: np.ndarray, dtype: str, inputs: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """The arrays that hold a parameter in one of `STORED_DTYPES`.

    Args:
      name: path of the parameter. Vectors and biases are bfloat16 beside int8 matrices.
      value: the parameter; integers, such as token ids, are stored as they are.
      dtype: int8 divides the largest value of a channel into 127 steps; in `compact` a
        step is also at least a quarter of the channel's root mean square.
      inputs: axes that products sum over; the channels are those of the other axes.
    """
    assert dtype in STORED_DTYPES
    if value.dtype.kind in "iu":
        return {name: value}
    value = value.astype(np.float32)
    if dtype == "float32":
        return {name: value}
    is_bias = name.rpartition("/")[2].startswith("bias")
    if dtype == "bfloat16" or is_bias or value.ndim < 2:
        return {name: value.astype(ml_dtypes.bfloat16)}
    scale = np.abs(value).max(inputs, keepdims=True) / 127
    if dtype == "compact":
        mean = np.square(value).mean(inputs, keepdims=True)
        scale = np.maximum(scale, _COARSE * np.sqrt(mean))
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    return {name: np.rint(value / scale).astype(np.int8), name + SCALE: scale}


def raised(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters by name, in float32, from what `lowered` returned for them."""
    parameters = {}
    for name, value in arrays.items():
        scale = arrays.get(name + SCALE)
        if name.endswith(SCALE) and name.removesuffix(SCALE) in arrays:
            continue
        if scale is None:
            is_integer = value.dtype.kind in "iu"
            parameters[name] = value if is_integer else value.astype(np.float32)
            continue
        sizes = zip(scale.shape, value.shape, strict=False)
        fits = scale.ndim == value.ndim >= 2 and all(m in (1, n) for m, n in sizes)
        if not fits:
            raise ValueError(
                f"the scales of {name} have shape {list(scale.shape)}, which does not "
                f"fit {list(value.shape)}"
            )
        parameters[name] = value.astype(np.float32) * scale
    return parameters


def _pack(array: np.ndarray) -> np.ndarray:
    """A DEFLATE stream, `[n]` uint8, of the bytes of an array."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if _has_differences(flat.dtype):
        flat = np.diff(flat, prepend=flat.dtype.type(0))
    planes = flat.view(np.uint8).reshape(-1, flat.dtype.itemsize).T.tobytes()
    streams = []
    # Weights have no repeated sequences, and searching for them costs some per cent.
    for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_FILTERED):
        packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, strategy)
        streams.append(packer.compress(planes) + packer.flush())
    return np.frombuffer(min(streams, key=len), np.uint8)


def _unpack(name: str, stream: np.ndarray, about: str, most: int) -> np.ndarray:
    """The inverse of `_pack`; refuses arrays of more than `most` bytes."""
    kind, *axes = about.split(" ")
    if kind not in _DTYPES or not all(axis.isdecimal() for axis in axes):
        raise ValueError(f"{name[:80]} is described by {about[:80]!r}")
    dtype, shape = _DTYPES[kind], tuple(map(int, axes))
    size = math.prod(shape) * dtype.itemsize
    if size > most:
        raise ValueError(f"{name[:80]} is too large for the size of its file")
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # One byte more than is needed: a limit of 0 would be none.
        planes = unpacker.decompress(stream.tobytes(), size + 1)
    except zlib.error as error:
        raise ValueError(f"{name[:80]}: {error}") from error
    if len(planes) != size or not unpacker.eof:
        raise ValueError(f"{name[:80]} does not have the shape that is stated")
    elements = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1).T
    flat: np.ndarray[Any, Any] = np.ascontiguousarray(elements).view(dtype).reshape(-1)
    if _has_differences(dtype):
        flat = np.cumsum(flat, dtype=dtype)
    return flat.reshape(shape)


def _has_differences(dtype: np.dtype) -> bool:
    """Whether the differences of neighbours are packed; they wrap around exactly."""
    return dtype.kind in "iu" and dtype.itemsize > 1
