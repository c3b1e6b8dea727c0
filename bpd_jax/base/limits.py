"""Parsing of JSON and of lines, with limits that damaged or forged text cannot pass."""

import io
import json
import math
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from bpd_jax.base.errors import UserError

MOST_LINE = 1 << 24  # bytes
# Limit of a reader that keeps all lines of a file. As a Python object, each line takes
# some hundred bytes more than its text.
MOST_KEPT, LINE_COST = 1 << 30, 256  # bytes

# A byte-level vocabulary contains every byte and the end-of-text token.
SMALLEST_VOCABULARY = 257


def parse_json(text: str | bytes) -> Any:
    """Parses JSON whose numbers are all finite.

    Text that is not UTF-8, not JSON or nested too deeply, and NaN, infinities and
    numbers beyond float64 are a `ValueError`.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(
            text, parse_constant=_finite, parse_float=_finite, parse_int=_integer
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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
