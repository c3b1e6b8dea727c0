"""Large text files in blocks of complete lines, and files of token ids.

Text files of ids, plain or gzip, have one sequence per line: decimal numbers separated
by blanks. A `.npy` file is a one-dimensional array of integers, in which the token
end-of-text separates documents. The format is recognised by the content.
"""

import contextlib
import gzip
import os
import pathlib
import zlib
from collections.abc import Generator, Iterator

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import open_npy, without_mark
from bpd_jax.ngrams.counting.windows import TokenBatch
from bpd_jax.storage.paths import as_path, local_copy

_BLOCK = 1 << 24  # bytes
# Maximum bytes of a line: a complete corpus may be one line of token ids.
_MAX_LINE = 1 << 28
HIGHEST_ID = int(np.iinfo(np.int32).max)
_NPY_MAGIC = b"\x93NUMPY"
_ARRAY_BLOCK = 1 << 21  # tokens


def line_blocks(path: pathlib.Path, label: str | None) -> Generator[bytes, None, None]:
    """Yields blocks of complete lines of a plain or gzip file.

    Gzip is recognised by its content. A newline is added to the last line if it lacks
    one.

    Args:
      label: name of a progress bar, or None for no bar.
    """
    lines = 0
    unfinished: list[bytes] = []  # Parts of a line that ends in a later block.
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            compressed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream = gzip.GzipFile(fileobj=raw) if compressed else raw
            bar = stack.enter_context(
                progress.bar(
                    label=label or "",
                    total=None if compressed else path.stat().st_size or None,
                    unit="B",
                    unit_scale=True,
                    disable=label is None,
                )
            )
            first = True
            while data := stream.read(_BLOCK):
                bar.update(len(data))
                data, first = without_mark(data) if first else data, False
                end = data.rfind(b"\n") + 1
                if end:
                    block = b"".join([*unfinished, data[:end]])
                    lines += block.count(b"\n")
                    yield block
                    unfinished = []
                unfinished.append(data[end:])
                if len(unfinished) * _BLOCK > _MAX_LINE:
                    raise UserError(
                        f"{path} has a line of more than {_MAX_LINE:,} bytes after "
                        f"line {lines}: is it a text file?"
                    )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path} is truncated or damaged after line {lines}: {error}."
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if any(unfinished):
        yield b"".join([*unfinished, b"\n"])


def read_batches(
    path: str | os.PathLike[str], end_of_text: int | None
) -> Iterator[TokenBatch]:
    """Yields batches of some thousands of complete sequences of a file.

    Args:
      end_of_text: the token that separates the documents of a `.npy` file; empty
        documents are skipped. If None, the array is one document.
    """
    path = as_path(path)
    if _is_array(path):
        return _array_documents(path, end_of_text)
    return _text_lines(path, "read")


def highest_id(path: str | os.PathLike[str]) -> int:
    """Returns the highest id of a file; -1 if there is none."""
    path = as_path(path)
    if _is_array(path):
        blocks = _array_blocks(path, "highest id")
    else:
        blocks = (batch.tokens for batch in _text_lines(path, "highest id"))
    return max((int(block.max(initial=-1)) for block in blocks), default=-1)


def _is_array(path: pathlib.Path) -> bool:
    try:
        with path.open("rb") as raw:
            return raw.read(len(_NPY_MAGIC)) == _NPY_MAGIC
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _array_documents(
    path: pathlib.Path, end_of_text: int | None
) -> Iterator[TokenBatch]:
    unfinished: list[np.ndarray] = []  # parts of a document that ends in a later block
    for block in _array_blocks(path, "read"):
        ends = np.flatnonzero(block == end_of_text)  # empty if it is None
        if ends.size:
            complete = np.concatenate([*unfinished, block[: ends[-1]]])
            yield from _documents(complete, end_of_text)
            unfinished = []
            block = block[ends[-1] + 1 :]
        unfinished.append(block)
    if unfinished:
        yield from _documents(np.concatenate(unfinished), end_of_text)


def _documents(tokens: np.ndarray, end_of_text: int | None) -> Iterator[TokenBatch]:
    """Yields one batch of the non-empty documents, if there are any."""
    inside = tokens != end_of_text
    bounds = np.concatenate([[-1], np.flatnonzero(~inside), [tokens.size]])
    lengths = np.diff(bounds) - 1
    if inside.any():
        yield TokenBatch(tokens[inside], lengths[lengths > 0])


def _array_blocks(path: pathlib.Path, label: str) -> Iterator[np.ndarray]:
    """Yields a one-dimensional array of ids as int32, part by part."""
    try:
        array = open_npy(local_copy(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(
            f"{path} is truncated or damaged: its header does not match its size."
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"{path} holds {array.dtype} of shape {list(array.shape)}: token ids must "
            "be a one-dimensional array of integers, with documents concatenated."
        )
    with progress.bar(
        label=label,
        total=array.size,
        unit=" tokens",
        unit_scale=True,
    ) as bar:
        for begin in range(0, array.size, _ARRAY_BLOCK):
            block = np.asarray(array[begin : begin + _ARRAY_BLOCK])
            invalid = np.flatnonzero((block < 0) | (block > HIGHEST_ID))
            if invalid.size:
                raise UserError(
                    f"{path}, index {begin + invalid[0]}: {block[invalid[0]]} is not a "
                    "token id."
                )
            yield block.astype(np.int32)
            bar.update(block.size)


def _text_lines(path: pathlib.Path, label: str) -> Iterator[TokenBatch]:
    from bpd_jax.ngrams.counting import count_kernels

    before = 0  # lines
    for data in line_blocks(path, label):
        letters = np.frombuffer(data, np.uint8)
        ids = np.empty(letters.size // 2 + 1, np.int32)
        lengths = np.empty(data.count(b"\n") + 1, np.int64)
        size, lines, fault = count_kernels.parse_numbers(
            letters, ids, lengths, HIGHEST_ID
        )
        if fault:
            fields = data.split(b"\n")[lines].split()
            invalid = next(field for field in fields if parse_id(field) < 0)
            text = invalid.decode("utf-8", "backslashreplace")
            raise UserError(
                f"{path}, line {before + lines + 1}: {text!r} is not a token id; ids "
                "must be decimal numbers separated by blanks."
            )
        before += lines
        lengths = lengths[:lines]
        if size:
            yield TokenBatch(ids[:size], lengths[lengths > 0])


def parse_id(field: bytes) -> int:
    """Parses a token id; returns -1 if the field is not one."""
    digits = field.lstrip(b"0")
    if not field.isdigit() or len(digits) > 10:
        return -1
    token = int(digits or b"0")
    return token if token <= HIGHEST_ID else -1
