"""Reads text files and JSON Lines, with errors that name the file and line."""

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence

from bpd_jax import files
from bpd_jax.buckets import as_path
from bpd_jax.errors import UserError

Path = str | os.PathLike[str]


def is_json_lines(path: Path) -> bool:
    """Whether the name of a file is that of JSON Lines."""
    return as_path(path).name.endswith((".jsonl", ".jsonl.gz"))


def read_text(path: Path) -> str:
    """Returns the text of a file, with unchanged line endings.

    A byte order mark at the beginning is removed.

    Raises:
      UserError: the file cannot be read, is not UTF-8, or has more than
        `files.MOST_KEPT` bytes.
    """
    try:
        data = files.read_bytes(path, files.MOST_KEPT)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(
            f"{path} is too large to be read as one text ({error}): split it, or write "
            "JSON Lines."
        ) from error
    return _decode(data, path, offset=0)


def read_lines(path: Path, *, kept: bool = False) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its ending); `.gz` is decompressed.

    Args:
      path: the file.
      kept: whether the caller keeps all lines; see `files.bounded_lines`.

    Raises:
      UserError: the file cannot be read or decompressed, is not UTF-8, or is too large.
    """
    opened = gzip.open if str(path).endswith(".gz") else open
    offset = 0
    try:
        with opened(as_path(path), "rb") as file:
            lines = files.bounded_lines(file, path, kept=kept)
            for number, line in enumerate(lines, start=1):
                yield number, _decode(line, path, offset).rstrip("\r\n")
                offset += len(line)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from error


def read_json_field(
    path: Path, field: str, *, kept: bool = False
) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, the text in `field`) of a JSON Lines file.

    Blank lines are skipped. `kept` is as in `read_lines`.

    Raises:
      UserError: as `read_lines`; or a line is not a JSON object with a string in
        `field`.
    """
    for number, location, record in _records(path, kept):
        yield number, _text_of(record, field, location, False)


def read_json_fields(
    path: Path, fields: Sequence[str], may_be_empty: str | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (line number from 1, the text of each field) of a JSON Lines file.

    The field `answers/text` is the list `text` in the object `answers`, of which the
    first element is used, as in TensorFlow Datasets.

    Args:
      path: the file.
      fields: names of the fields.
      may_be_empty: a field that may be `null` or an empty list, which yields an empty
        text.

    Raises:
      UserError: as `read_json_field`.
    """
    for number, location, record in _records(path):
        yield (
            number,
            {
                field: _text_of(record, field, location, field == may_be_empty)
                for field in fields
            },
        )


def read_json_texts(path: Path, field: str) -> Iterator[tuple[int, list[str]]]:
    """Yields (line number from 1, all texts of a field) of a JSON Lines file.

    The texts of the field `answers/text` are the elements of the list `text` in the
    object `answers`. A field with a single text yields a list of one, `null` an empty
    list.

    Raises:
      UserError: as `read_json_fields`.
    """
    for number, location, record in _records(path):
        first = _first_value(record, field)
        if first is None:
            yield number, []
            continue
        value = _value(record, field)
        texts = value if isinstance(value, list) and "/" in field else [first]
        yield number, [_checked_text(text, field, location) for text in texts]


def _records(path: Path, kept: bool = False) -> Iterator[tuple[int, str, object]]:
    """Yields (line number from 1, location for error messages, parsed JSON)."""
    for number, line in read_lines(path, kept=kept):
        if not line.strip():
            continue
        location = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{location} is not JSON: {error.msg} at column {error.colno}."
            ) from error
        except (RecursionError, ValueError) as error:
            # Thousands of nested objects, or a number of thousands of digits.
            raise UserError(f"{location} cannot be read as JSON: {error}.") from error
        yield number, location, record


# The value of a missing field.
_MISSING = object()


def _value(record: object, field: str) -> object:
    """The value of a field: None for `null`, `_MISSING` for a missing field."""
    value = record
    for name in field.split("/"):
        value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
        if value is None:
            return None
    return value


def _first_value(record: object, field: str) -> object:
    """The value of a field, or the first element of a list `a/b`; None for `[]`."""
    value = _value(record, field)
    if "/" in field and isinstance(value, list):
        return value[0] if value else None
    return _MISSING if "/" in field and isinstance(value, str) else value


def _text_of(record: object, field: str, location: str, may_be_empty: bool) -> str:
    value = _first_value(record, field)
    if value is None and may_be_empty:
        return ""
    return _checked_text(value, field, location)


def _checked_text(value: object, field: str, location: str) -> str:
    if not isinstance(value, str):
        example: object = ["..."] if "/" in field else "..."
        for name in reversed(field.split("/")):
            example = {name: example}
        raise UserError(
            f"{location} has no text in the field {field!r}: each line must look like "
            f"{json.dumps(example)}."
        )
    # JSON can contain a lone surrogate, which UTF-8 cannot.
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{location}: the field {field!r} contains the lone surrogate "
            f"\\u{ord(value[error.start]):04x}, which is not valid text."
        ) from error
    return value


def _decode(data: bytes, path: Path, offset: int) -> str:
    """Decodes bytes that start at `offset` of the file."""
    if offset == 0 and data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
        offset = len(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte offset {offset + error.start}): convert "
            "it to UTF-8 or exclude it."
        ) from error
