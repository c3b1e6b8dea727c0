"""Reads text files, JSON Lines and prompts, with errors that name the file and line."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from bpd_jax.base import reading
from bpd_jax.base.errors import UserError
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path

Path = str | os.PathLike[str]


def is_json_lines(path: Path) -> bool:
    """Whether the name of a file is that of JSON Lines."""
    return as_path(path).name.endswith((".jsonl", ".jsonl.gz"))


def read_text(path: Path) -> str:
    """Returns the text of a file, with unchanged line endings, without a BOM."""
    try:
        data = files.read_bytes(path, reading.MOST_KEPT)
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

    For `kept` see `reading.bounded_lines`.
    """
    offset = 0
    try:
        with as_path(path).open("rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if str(path).endswith(".gz") else raw
            lines = reading.bounded_lines(file, path, kept=kept)
            for number, line in enumerate(lines, start=1):
                yield number, _decode(line, path, offset).rstrip("\r\n")
                offset += len(line)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from error


def read_json_fields(
    path: Path,
    fields: Sequence[str],
    optional: str | None = None,
    *,
    kept: bool = False,
) -> Iterator[tuple[int, dict[str, list[str]]]]:
    """Yields (line number from 1, the texts of each field) of a JSON Lines file.

    The texts of the field `answers/text` are the elements of the list `text` in the
    object `answers`, as in TensorFlow Datasets; any other field has one text. Blank
    lines are skipped.

    Args:
      path: the file.
      fields: names of the fields.
      optional: a field that may be `null` or an empty list, which yields no text.
      kept: see `read_lines`.
    """
    for number, line in read_lines(path, kept=kept):
        if not line.strip():
            continue
        location = f"{path}, line {number}"
        try:
            record = json.loads(line)
        # Thousands of nested objects, or a number of thousands of digits.
        except (RecursionError, ValueError) as error:
            raise UserError(f"{location} is not JSON: {error}.") from error
        texts = {field: _texts(record, field) for field in fields}
        for field, values in texts.items():
            _check_texts(values, field, location, empty=field == optional)
        yield number, texts


def _texts(record: Any, field: str) -> Any:
    """The texts of a field; `[]` for `null`, and None if the field is missing."""
    value = record
    for name in field.split("/"):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
        if value is None:
            return []
    if "/" not in field:
        return [value]
    return [] if value == [None] else value


def _check_texts(values: Any, field: str, location: str, empty: bool) -> None:
    is_list = isinstance(values, list) and (empty or values)
    if not is_list or not all(isinstance(text, str) for text in values):
        example: object = ["..."] if "/" in field else "..."
        for name in reversed(field.split("/")):
            example = {name: example}
        raise UserError(
            f"{location} has no text in the field {field!r}: each line must look like "
            f"{json.dumps(example)}."
        )
    # JSON can contain a lone surrogate, which UTF-8 cannot.
    try:
        "".join(values).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{location}: the field {field!r} contains a lone surrogate, which is not "
            f"valid text ({error})."
        ) from error


def _decode(data: bytes, path: Path, offset: int) -> str:
    """Decodes bytes that start at `offset` of the file."""
    text = reading.without_mark(data) if offset == 0 else data
    offset += len(data) - len(text)
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte offset {offset + error.start}): convert "
            "it to UTF-8 or exclude it."
        ) from error


def read_prompts_file(path: str | os.PathLike[str]) -> list[str]:
    """Reads prompts: JSON Lines with the field `prompt`, or one prompt per line.

    A file named `.jsonl` or `.jsonl.gz` is JSON Lines. Blank lines of other files are
    skipped.
    """
    if is_json_lines(path):
        records = read_json_fields(path, ["prompt"], kept=True)
        prompts = [texts["prompt"][0] for _, texts in records]
    else:
        lines = read_lines(path, kept=True)
        prompts = [text for _, text in lines if text.strip()]
    if not prompts:
        raise UserError(f"{path} contains no prompt: write one per line.")
    check_texts(prompts)
    return prompts


def check_texts(prompts: Sequence[object]) -> None:
    """Refuses prompts that are empty texts or not UTF-8."""
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str):
            continue
        if not prompt:
            raise UserError(f"prompt {number} is empty: give at least one character.")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            # Python keeps a byte of the command line as a surrogate.
            code = ord(prompt[error.start])
            kind = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else ""
            raise UserError(
                f"prompt {number} is not UTF-8 text: character {error.start + 1} is "
                f"the {kind or f'lone surrogate U+{code:04X}'}."
            ) from error
