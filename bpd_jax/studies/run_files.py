"""The folder of a study's results: `study.json`, and records as JSON Lines.

Records are appended, one per line, so that an interrupted run loses at most one
record; the next run truncates an incomplete line and resumes. Published results are
compressed (`records.jsonl.xz`, earlier `records.jsonl.gz`).
"""

import dataclasses
import functools
import gzip
import json
import lzma
import mmap
import os
import pathlib
import types
import typing
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from bpd_jax.base import reading
from bpd_jax.base.errors import UserError
from bpd_jax.reporting.records import Facts
from bpd_jax.storage import files, folders
from bpd_jax.storage.paths import as_path, local_copy
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_records import (
    RECORD_KINDS,
    ExplorerRecord,
    Record,
)

HEADER, RECORDS = "study.json", "records.jsonl"
# Every shard of a run has a file of records. Published records are the oldest.
_RECORD_FILES = ("records*.jsonl.xz", "records*.jsonl.gz", "records*.jsonl")
PUBLISHED = folders.FolderKind("results of a study", HEADER, _RECORD_FILES, '"study"')
# A folder of unfinished results may contain other files.
KIND = dataclasses.replace(PUBLISHED, in_place=True)
_NAMES = {kind: name for name, kind in RECORD_KINDS.items()}
# Sums of smaller numbers, and thousandths of them, stay exact enough.
_LARGEST = 1e15
# What every study reads of its header.
_FACTS = {
    "examples": dict[str, dict[str, int]],
    "labels": dict[str, str],
    "tasks": dict[str, str],
}


def write_header(folder: pathlib.Path, study: str, facts: Facts) -> None:
    """Writes `study.json`."""
    content = {"study": study, **facts}
    files.write_json(folder / HEADER, content, indent=1, ensure_ascii=False)


def append_records(
    folder: pathlib.Path, records: Sequence[Record], name: str = RECORDS
) -> None:
    """Appends records, after truncating an incomplete last line.

    Args:
      folder: folder of the results.
      records: records to append.
      name: name of the file; the file of a shard has a suffix before `.jsonl`.
    """
    if not records:
        return
    path = folder / name
    lines = [_line(record) for record in records]
    try:
        with path.open("ab+") as stream:
            stream.truncate(_complete_size(stream))
            stream.write("".join(lines).encode("utf-8"))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.") from error


def _line(record: Record) -> str:
    fields = {"kind": _NAMES[type(record)], **dataclasses.asdict(record)}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")) + "\n"


def _complete_size(stream: BinaryIO) -> int:
    """Size in bytes up to the end of the last complete line."""
    if os.fstat(stream.fileno()).st_size == 0:  # Cannot be mapped.
        return 0
    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1


def read_records(folder: pathlib.Path) -> list[Record]:
    """Reads all files of records of a folder, compressed ones first.

    A run with further contenders records a text of the explorer again; the last record
    of each is returned.
    """
    paths = [path for names in _RECORD_FILES for path in sorted(folder.glob(names))]
    records = [record for path in paths for record in _read_file(path)]
    latest = {r.key: r for r in records if isinstance(r, ExplorerRecord)}
    return [
        r for r in records if not isinstance(r, ExplorerRecord) or latest[r.key] is r
    ]


def _read_file(path: pathlib.Path) -> Iterator[Record]:
    opened: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opened(local_copy(path), "rb") as stream:
            lines = reading.bounded_lines(stream, path, kept=True)
            for number, line in enumerate(lines, start=1):
                # A line without a line break is incomplete.
                if line.endswith(b"\n"):
                    yield _record(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"cannot read {path}: {error}.") from error


def _record(line: bytes, location: str) -> Record:
    try:
        fields: dict[str, Any] = reading.parse_json(line)
        record: Record = typed(RECORD_KINDS[fields.pop("kind")], fields, "it")
        return record
    except (ValueError, KeyError, AttributeError, TypeError, UserError) as error:
        raise UserError(f"{location} is not a study record: {error}.") from error


_type_hints = functools.cache(typing.get_type_hints)


def typed(kind: Any, value: Any, name: str) -> Any:
    """Returns a JSON value as the type `kind`.

    >>> typed(dict[str, list[float]], {"a": [0.5, 1]}, "alphas")
    {'a': [0.5, 1]}

    Args:
      kind: a dataclass, whose fields must all be there; `list`, `dict`, a plain type,
        `X | None`.
      name: its name in errors.

    Raises:
      TypeError, ValueError: a field is missing, unknown, out of range, or of another
        type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # Only `X | None` occurs.
        return None if value is None else typed(arguments[0], value, name)
    is_record = dataclasses.is_dataclass(kind)
    plain: Any = dict if is_record else origin or kind
    # Some writers write 1.0 as 1, and bool is a subclass of int.
    fitting: Any = (int, float) if plain is float else plain
    is_bool = isinstance(value, bool)
    if not isinstance(value, fitting) or (is_bool and plain is not bool):
        raise TypeError(f"{name} is not of the type {plain.__name__}")
    if plain in (int, float) and not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{name} is {value:.3g}")
    if origin is list:
        return [typed(arguments[0], item, name) for item in value]
    if is_record:
        hints = _type_hints(kind)
        return kind(**{key: typed(hints[key], value[key], key) for key in value})
    if origin is dict:
        return {key: typed(arguments[1], item, name) for key, item in value.items()}
    return value


def read_header(folder: pathlib.Path) -> Facts:
    """Reads `study.json`."""
    path = folder / HEADER
    try:
        facts = files.read_json(path)
        if "study" not in facts:
            raise ValueError("its study has no name")
        for name, kind in _FACTS.items():
            typed(kind, facts.get(name, {}), name)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist: {folder} has no study results; "
            "python -m experiments.run makes them."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}.") from error
    return facts


def open_run(folder: str | os.PathLike[str]) -> StudyRun:
    """Reads the results in a folder."""
    folder = as_path(folder)
    facts = read_header(folder)
    study = facts.pop("study")
    return StudyRun(folder, study, facts, read_records(folder))


def publish(run: StudyRun, folder: pathlib.Path) -> None:
    """Writes a run reproducibly: sorted records, compressed without a time stamp."""
    lines = sorted(_line(record) for record in run.records)
    with folders.replacing_folder(folder, PUBLISHED) as temporary:
        write_header(temporary, run.study, run.facts)
        # Text is not aligned: without position bits files are 5 % smaller.
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "pb": 0}]
        packed = lzma.compress("".join(lines).encode("utf-8"), filters=filters)
        (temporary / f"{RECORDS}.xz").write_bytes(packed)
