"""The header of a GGUF file: what it says of its model and where its tensors lie.

    magic, version, number of tensors, number of values
    values:  key, type, value (a number, a string, or an array of either)
    tensors: name, dimensions, type, offset in the data
    padding, data

Nothing in it is believed. Every count and length is held against the bytes that are
left before anything is made from it, so a damaged file costs one sentence, never more
memory than a small multiple of the file. Numeric arrays are views of the file.
"""

import dataclasses
import itertools
import math
import mmap
import struct
from typing import NoReturn, TypeAlias

import numpy as np

from bpd_jax.errors import UserError

Value: TypeAlias = int | float | bool | str | np.ndarray | list[str]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32

# Types of values: by the letters that both struct and numpy give to numbers.
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9

# Far above any model's: where a file is huge, its size alone would allow too much.
_MOST_VALUES = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_STRINGS = 1 << 22
_LONGEST_STRING = 1 << 24
_MOST_DIMENSIONS = 4

# The smallest value has a key's length, a type and a byte; the smallest tensor has a
# name's length, a number of dimensions, one dimension, a type and an offset.
_SMALLEST_VALUE = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies.

    Attributes:
      shape: row-major, so the last axis is the contiguous one.
      kind: its type, as a number of ggml's.
      start: of its bytes in the file.
      size: in bytes.
    """

    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class Header:
    """Values by their keys, tensors by their names."""

    values: dict[str, Value]
    tensors: dict[str, TensorEntry]


def read_header(
    data: mmap.mmap, path: str, block_sizes: dict[int, tuple[int, int]]
) -> Header:
    """Reads and checks a header.

    Args:
      data: the file.
      path: what errors call it.
      block_sizes: by type, the elements of one block and its bytes.

    Raises:
      UserError: the file is no GGUF file, or damaged, or of a form that is not read.
    """
    cursor = _Cursor(data, path)
    cursor.check_magic()
    num_tensors = cursor.count("number of tensors", _MOST_TENSORS, _SMALLEST_TENSOR)
    num_values = cursor.count("number of values", _MOST_VALUES, _SMALLEST_VALUE)
    values: dict[str, Value] = {}
    for _ in range(num_values):
        key = cursor.string("a key")
        if key in values:
            cursor.damaged(f"it has the key {_short(key)} twice")
        values[key] = cursor.value(key)
    alignment = values.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        cursor.damaged("its general.alignment is not a power of two")

    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.string("a tensor's name")
        if name in infos:
            cursor.damaged(f"it has two tensors named {_short(name)}")
        infos[name] = cursor.tensor(name)
    origin = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _placed(cursor, name, shape, kind, offset, origin, alignment, block_sizes)
        for name, (shape, kind, offset) in infos.items()
    }
    ordered = sorted(tensors.items(), key=lambda item: item[1].start)
    for (name, entry), (after, its_entry) in itertools.pairwise(ordered):
        if entry.start + entry.size > its_entry.start:
            cursor.damaged(f"its tensors {_short(name)} and {_short(after)} overlap")
    return Header(values, tensors)


def _placed(
    cursor: "_Cursor",
    name: str,
    shape: tuple[int, ...],
    kind: int,
    offset: int,
    origin: int,
    alignment: int,
    block_sizes: dict[int, tuple[int, int]],
) -> TensorEntry:
    """Checks that a tensor's bytes lie within the file."""
    if kind not in block_sizes:
        raise UserError(
            f"{cursor.path}: tensor {_short(name)} is of type {kind}, which is not "
            "known: update the package gguf, or quantise the model in another type."
        )
    elements, size = block_sizes[kind]
    if shape[-1] % elements:
        cursor.damaged(
            f"rows of tensor {_short(name)} have {shape[-1]} elements, which is no "
            f"multiple of its type's {elements}"
        )
    total = math.prod(shape) // elements * size
    if offset % alignment:
        cursor.damaged(
            f"tensor {_short(name)} does not start at a multiple of {alignment} bytes"
        )
    start = origin + offset
    if start + total > len(cursor.data):
        raise UserError(
            f"{cursor.path} is truncated or damaged: tensor {_short(name)} would end "
            f"at byte {start + total:,} of {len(cursor.data):,}; fetch the file again."
        )
    return TensorEntry(shape, kind, start, total)


class _Cursor:
    """Walks over a file, and never past its end."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def damaged(self, what: str) -> NoReturn:
        raise UserError(f"{self.path} is damaged: {what}; fetch the file again.")

    def check_magic(self) -> None:
        if self.data[: len(_MAGIC)] != _MAGIC:
            raise UserError(
                f"{self.path} is not a GGUF file: it does not start with GGUF."
            )
        self.position = len(_MAGIC)
        version = self.number("I", "its version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                raise UserError(
                    f"{self.path} is a big-endian GGUF file: convert the model again "
                    "for little-endian machines."
                )
            raise UserError(
                f"{self.path} is of GGUF version {version}; versions 2 and 3 can be "
                "read: convert the model again."
            )

    def take(self, size: int, what: str) -> int:
        """Moves over `size` bytes and returns where they start."""
        start = self.position
        if size > len(self.data) - start:
            raise UserError(
                f"{self.path} is truncated or damaged: it ends within {what}; fetch "
                "the file again."
            )
        self.position = start + size
        return start

    def number(self, letter: str, what: str) -> int:
        layout = f"<{letter}"
        start = self.take(struct.calcsize(layout), what)
        return struct.unpack_from(layout, self.data, start)[0]

    def count(self, what: str, most: int, smallest: int) -> int:
        """A number of things that have at least `smallest` bytes each."""
        count = self.number("Q", what)
        if count > most or count * smallest > len(self.data) - self.position:
            self.damaged(f"{what} cannot be {count:,}")
        return count

    def string(self, what: str) -> str:
        length = self.count(f"the length of {what}", _LONGEST_STRING, 1)
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            self.damaged(f"{what} is not UTF-8")

    def value(self, key: str) -> Value:
        key = _short(key)
        kind = self.number("I", f"the type of {key}")
        if kind == _STRING:
            return self.string(f"the value of {key}")
        if kind == _ARRAY:
            return self.array(key)
        number = self.number(self.letter(kind, key), f"the value of {key}")
        # What was written as 1e-5 is to be read as 1e-5.
        return float(str(np.float32(number))) if kind == _FLOAT else number

    def array(self, key: str) -> np.ndarray | list[str]:
        kind = self.number("I", f"the type of {key}")
        what = f"the number of elements of {key}"
        if kind == _STRING:
            count = self.count(what, _MOST_STRINGS, 8)
            return [self.string(f"an element of {key}") for _ in range(count)]
        # Any byte but zero is true; numpy takes only one.
        dtype = np.dtype("<" + self.letter(kind, key).replace("?", "B"))
        count = self.count(what, len(self.data), dtype.itemsize)
        start = self.take(count * dtype.itemsize, key)
        array = np.frombuffer(self.data, dtype, count, start)
        return array != 0 if kind == _BOOL else array

    def letter(self, kind: int, key: str) -> str:
        if kind not in _NUMBERS:
            self.damaged(f"the value of {key} is of type {kind}, which is not known")
        return _NUMBERS[kind]

    def tensor(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """The shape, type and offset of a tensor."""
        what = f"the description of tensor {_short(name)}"
        rank = self.number("I", what)
        if not 1 <= rank <= _MOST_DIMENSIONS:
            self.damaged(f"tensor {_short(name)} cannot have {rank} dimensions")
        dimensions = [self.number("Q", what) for _ in range(rank)]
        if 0 in dimensions:
            self.damaged(f"tensor {_short(name)} has a dimension of 0")
        shape = tuple(reversed(dimensions))
        return shape, self.number("I", what), self.number("Q", what)


def _short(name: str) -> str:
    """A name of the file as a sentence may quote it."""
    return repr(name) if len(name) <= 80 else f"{name[:80]!r}…"
