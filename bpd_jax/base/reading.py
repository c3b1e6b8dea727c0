"""Reading of JSON, lines and arrays, which may be damaged or forged.

Limits keep such files from filling the memory. An `ArraySpec` declares the requirements
on an array, whose faults raise an `OSError` or a `ValueError`; the caller adds the name
of the file and the remedy.
"""

import codecs
import contextlib
import dataclasses
import io
import json
import math
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from bpd_jax.base.errors import UserError

MOST_LINE = 1 << 24  # bytes
# Limit of a reader that keeps all lines of a file. As a Python object, each line takes
# some hundred bytes more than its text.
MOST_KEPT, LINE_COST = 1 << 30, 256  # bytes
_BLOCK = 1 << 20  # elements of an array that are checked together

# A byte-level vocabulary contains every byte and the end-of-text token.
SMALLEST_VOCABULARY = 257


def parse_json(text: str | bytes) -> Any:
    """Parses JSON whose numbers are all finite.

    Text that is not UTF-8, not JSON or nested too deeply, and NaN, infinities and
    numbers beyond float64 are a `ValueError`.
    """
    try:
        if isinstance(text, bytes):
            text = without_mark(text).decode("utf-8")
        return json.loads(
            text, parse_constant=_finite, parse_float=_finite, parse_int=_integer
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def without_mark(text: bytes) -> bytes:
    """A text without the byte order mark with which some programs begin UTF-8."""
    return text.removeprefix(codecs.BOM_UTF8)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the range of numbers")
    return value


def _integer(text: str) -> int:
    _finite(text)
    return int(text)


def bounded_lines(
    stream: BinaryIO | io.BufferedIOBase,
    path: str | os.PathLike[str],
    *,
    kept: bool = False,
) -> Iterator[bytes]:
    """Yields the lines of a file, with limits so that they cannot fill the memory.

    A few megabytes of gzip can unpack to gigabytes, in one line or in many. If the
    caller keeps all lines, they must fit into `MOST_KEPT` bytes of memory, with
    `LINE_COST` for each.
    """
    number, total = 1, 0
    while line := stream.readline(MOST_LINE + 1):
        if len(line) > MOST_LINE:
            raise UserError(
                f"{path}, line {number}, has more than {MOST_LINE:,} bytes: is this a "
                "file of lines?"
            )
        total += len(line) + LINE_COST
        if kept and total > MOST_KEPT:
            raise UserError(
                f"{path} is too large to be kept in memory: its first {number:,} lines "
                f"take more than {MOST_KEPT >> 20} MiB there; split the file."
            )
        yield line
        number += 1


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The requirements on an array.

    Attributes:
      dtypes: allowed dtypes as in `np.dtype.str`, such as `<i8`; None for all.
      shape: size of every axis; None for any size.
      low: minimum of all elements.
      high: maximum of all elements.
      finite: whether infinities are refused; NaN is always refused.
      increasing: whether the elements of a vector must be strictly increasing.
    """

    dtypes: tuple[str, ...] | None
    shape: tuple[int | None, ...]
    low: float | None = None
    high: float | None = None
    finite: bool = True
    increasing: bool = False

    def check_header(self, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        """Raises a `ValueError` unless dtype and shape are allowed."""
        if self.dtypes is not None and dtype.str not in self.dtypes:
            raise ValueError(f"its dtype is {dtype}, not {' or '.join(self.dtypes)}")
        sizes = [n if e is None else e for e, n in zip(self.shape, shape, strict=False)]
        if len(shape) != len(self.shape) or list(shape) != sizes:
            expected = ["any" if size is None else size for size in self.shape]
            raise ValueError(f"its shape is {list(shape)}, not {expected}")

    def check(self, array: np.ndarray) -> None:
        """Raises a `ValueError` unless an array meets all requirements."""
        self.check_header(array.dtype, array.shape)
        flat = array.reshape(-1)
        for begin in range(0, flat.size, _BLOCK):
            values = flat[begin : begin + _BLOCK]
            low, high = values.min(), values.max()  # NaN if there is one.
            if np.isnan(low):
                raise ValueError("it contains NaN")
            if self.finite and np.isinf([low, high]).any():
                raise ValueError("it contains an infinite number")
            if self.low is not None and low < self.low:
                raise ValueError(f"it contains {low}, which is below {self.low}")
            if self.high is not None and high > self.high:
                raise ValueError(f"it contains {high}, which is above {self.high}")
            if self.increasing:
                # The last element of the previous block is compared as well.
                part = flat[max(begin - 1, 0) : begin + _BLOCK]
                if not (part[1:] > part[:-1]).all():
                    raise ValueError("its elements do not increase")


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
        with _damage_as_value_error(f"{name}: "):
            spec = ArraySpec(None, tuple(shape))
            spec.check_header(arrays[name].dtype, arrays[name].shape)


def open_npy(path: str | os.PathLike[str]) -> np.ndarray:
    """Maps a .npy file into memory, read-only."""
    with _damage_as_value_error():
        return np.load(path, mmap_mode="r", allow_pickle=False)


def read_npz(
    path: str | os.PathLike[str] | BinaryIO,
    specs: Mapping[str, ArraySpec] | None = None,
    optional: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Reads an uncompressed .npz file, as `files.write_npz` writes, with its checksums.

    Args:
      path: the file.
      specs: requirements by name of an array; None accepts all arrays.
      optional: names in `specs` of arrays that may be missing.
    """
    arrays: dict[str, np.ndarray] = {}
    with _damage_as_value_error(), zipfile.ZipFile(path) as archive:
        members = {i.filename.removesuffix(".npy"): i for i in archive.filelist}
        if specs is not None:
            check_names({*members, *optional}, specs)
        for name, info in members.items():
            with _damage_as_value_error(f"{name[:80]}: "), archive.open(info) as stream:
                # A compressed array of a few bytes could fill the memory.
                if info.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("it is compressed")
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
                # At its end, zipfile verifies the checksum.
                if stream.read(1):
                    raise ValueError("its shape does not match its size")
                if specs is not None:
                    specs[name].check(arrays[name])
    return arrays


@contextlib.contextmanager
def _damage_as_value_error(prefix: str = "") -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # numpy and zipfile raise a dozen kinds for damage.
        # Further lines of numpy's messages advise programmers.
        line = str(error).strip().partition("\n")[0]
        raise ValueError(prefix + (line or type(error).__name__)) from error
