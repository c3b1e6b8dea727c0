"""Prepares folders of packed rows of a task, which later runs reuse."""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.data import row_sources, tokenizer
from bpd_jax.data.example_task import DataTask, ExampleTask
from bpd_jax.data.row_shards import shard_folders, shard_name
from bpd_jax.data.row_sources import WHOLE, Shard
from bpd_jax.data.rows import KIND, LOSS_MASK, PackedRows, open_rows, token_dtype
from bpd_jax.data.task_tokenizer import (
    source_fingerprint,
    task_tokenizer,
    vocabulary_fingerprint,
)
from bpd_jax.storage import folders
from bpd_jax.storage.paths import as_path

# Segment ids are stored as uint16, and a row may have as many segments as tokens.
_MAX_LENGTH = 65535


def prepare_rows(
    task: DataTask,
    split: str,
    length: int,
    folder: str | os.PathLike[str],
    shard: Shard = WHOLE,
    cache_dir: str | None = None,
) -> PackedRows:
    """Tokenizes and packs one split into `folder`, or reuses existing rows.

    Existing rows of the same task, text, vocabulary, split and length are reused. If
    only the text has changed, or the rows are damaged, the folder is replaced; rows of
    other settings, and shards, are never replaced. A host may lack the text, or seqio,
    which reads data sets; there the text is not compared.

    Args:
      task: source and vocabulary.
      split: a split of the task: `train`, `validation`, for some tasks `test`.
      length: tokens of a row, T.
      folder: folder of the rows.
      shard: the part of the split to make, in a subfolder of `folder`; when all parts
        exist, `folder` can be opened as one folder of rows. Parts may be made by
        several machines.
      cache_dir: folder in which `cache_pipeline.cache_task` cached the task's tokens;
        None reads the text.

    Returns:
      The rows of the split, or of `shard`.
    """
    task.check_split(split)
    if not 2 <= length <= _MAX_LENGTH:
        raise UserError(f"length is {length}: a row holds 2 to {_MAX_LENGTH} tokens.")
    if not 0 <= shard.index < shard.count:
        raise UserError(
            f"there is no shard {shard.index} of {shard.count}: indices of shards are "
            f"0 to {shard.count - 1}."
        )
    folder = as_path(folder)
    fingerprint = rows_fingerprint(task, split, length)
    if shard.count > 1:
        if (folder / "rows.json").exists():
            raise UserError(
                f"{folder} holds rows that are not a shard: name another folder for "
                "the shards, or remove it."
            )
        folder = folder / shard_name(shard.index, shard.count)
        fingerprint["shard"] = [shard.index, shard.count]
    existing = _find_rows(folder)
    if fingerprint.items() <= existing.items():
        return open_rows(folder)
    # A host without the text can only use rows that were copied to it.
    fingerprint["source"] = _source(task, split)
    differing = [k for k in fingerprint if fingerprint[k] != existing.get(k)]
    differing.sort(key=lambda name: (name == "source", name))
    shards = folder.is_dir() and shard_folders(folder)
    if existing and (shards or differing != ["source"]):
        name = differing[0]
        raise UserError(
            f"{folder} holds other rows: {name} is {existing.get(name)!r} there and "
            f"{fingerprint[name]!r} here; name another folder, or remove it."
        )
    folders.check_folder(folder, KIND)
    _make_rows(task, split, length, folder, fingerprint, shard, cache_dir)
    return open_rows(folder)


def rows_fingerprint(task: DataTask, split: str, length: int) -> dict[str, Any]:
    """The settings, text and vocabulary that determine rows, as JSON values.

    The fingerprint of the text, `source`, is missing on a host without the text.
    """
    fingerprint: dict[str, Any] = {
        **task.identity,
        "vocabulary": vocabulary_fingerprint(task),
        "split": split,
        "length": length,
    }
    with contextlib.suppress(UserError):
        fingerprint["source"] = _source(task, split)
    return fingerprint


def _source(task: DataTask, split: str) -> str:
    """The fingerprint of the text."""
    if isinstance(task, ExampleTask) and importlib.util.find_spec("seqio") is None:
        raise UserError(
            f"the {split} rows of {task.name} cannot be made on this host, because "
            "seqio is not installed: install bpd_jax with the extra data, or make them "
            "on another machine and copy the folder."
        )
    return source_fingerprint(task, split)


def _find_rows(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the fingerprint of the rows in `folder`; {} if they are not valid."""
    if folder.is_dir() and shard_folders(folder):
        return open_rows(folder).fingerprint
    try:
        return open_rows(folder).fingerprint
    except UserError:
        return {}


def _make_rows(
    task: DataTask,
    split: str,
    length: int,
    folder: pathlib.Path,
    fingerprint: dict[str, Any],
    shard: Shard,
    cache_dir: str | None,
) -> None:
    vocabulary = task_tokenizer(task)
    source = row_sources.open_source(task, split, length, vocabulary, shard, cache_dir)
    num_tokens = 0
    with folders.replacing_folder(folder, KIND) as temporary:
        with contextlib.ExitStack() as stack:

            def open_writer(name: str, dtype: Any) -> _NpyWriter:
                return stack.enter_context(_NpyWriter(temporary / name, dtype, length))

            tokens = open_writer("tokens.npy", token_dtype(source.vocab_size))
            segment_ids = open_writer("segment_ids.npy", np.uint16)
            mask = open_writer(LOSS_MASK, bool) if source.has_context else None
            for row in source.rows:
                tokens.append(row.tokens)
                segment_ids.append(row.segment_ids)
                if mask is not None:
                    mask.append(row.loss_mask)
                num_tokens += int(np.count_nonzero(row.segment_ids))
        if not tokens.rows:
            part = f"shard {shard.index} of {shard.count} of " * (shard.count > 1)
            raise UserError(
                f"{part}the {split} split of {task.name} is empty: give more text"
                f"{', or fewer shards' * (shard.count > 1)}."
            )
        header = {
            "rows": tokens.rows,
            "length": length,
            "tokens": num_tokens,
            "split": split,
            "vocabulary": task.vocabulary,
            **row_sources.describe_source(source),
            "task": dataclasses.asdict(task),
            "fingerprint": fingerprint,
        }
        KIND.write_header(temporary, header)
        vocabulary.save(temporary / tokenizer.FILE_NAME)


class _NpyWriter:
    """Writes a .npy file of an unknown number of rows, row by row."""

    def __init__(self, path: pathlib.Path, dtype: Any, length: int) -> None:
        self.rows = 0
        self._length = length
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")

    def __enter__(self) -> "_NpyWriter":
        self._write_header()
        return self

    def append(self, row: np.ndarray) -> None:
        self._file.write(row.astype(self._dtype).tobytes())
        self.rows += 1

    def __exit__(self, *error: object) -> None:
        # numpy pads the header with spaces, so that the final shape fits.
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": self._dtype.str,
                "fortran_order": False,
                "shape": (self.rows, self._length),
            },
        )
