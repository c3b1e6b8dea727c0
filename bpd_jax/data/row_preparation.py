"""Prepares folders of packed rows of a task, which later runs reuse."""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.data import tokenizer
from bpd_jax.data.example_task import DataTask, ExampleTask
from bpd_jax.data.row_shards import shard_folders, shard_name
from bpd_jax.data.row_sources import WHOLE, RowSource, Shard, open_source
from bpd_jax.data.rows import KIND, PackedRows, array_dtypes, open_rows
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
        exist, `folder` can be opened as one folder of rows.
      cache_dir: folder in which `cache_pipeline.cache_task` cached the task's tokens;
        None reads the text.
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
    shards = folder.is_dir() and shard_folders(folder)
    try:
        existing = open_rows(folder).fingerprint
    except UserError:
        if shards:
            raise
        existing = {}
    if fingerprint.items() <= existing.items():
        return open_rows(folder)
    # A host without the text can only use rows that were copied to it.
    fingerprint["source"] = _source(task, split)
    differing = [k for k in fingerprint if fingerprint[k] != existing.get(k)]
    differing.sort(key=lambda name: (name == "source", name))
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
    source = open_source(task, split, length, vocabulary, shard, cache_dir)
    with folders.replacing_folder(folder, KIND) as temporary:
        num_rows, num_tokens = _write_arrays(temporary, source, length)
        if not num_rows:
            part = f"shard {shard.index} of {shard.count} of " * (shard.count > 1)
            raise UserError(
                f"{part}the {split} split of {task.name} is empty: give more text"
                f"{', or fewer shards' * (shard.count > 1)}."
            )
        header = {
            "rows": num_rows,
            "length": length,
            "tokens": num_tokens,
            "split": split,
            "vocabulary": task.vocabulary,
            **source.facts,
            "task": dataclasses.asdict(task),
            "fingerprint": fingerprint,
        }
        KIND.write_header(temporary, header)
        vocabulary.save(temporary / tokenizer.FILE_NAME)


def _write_arrays(
    folder: pathlib.Path, source: RowSource, length: int
) -> tuple[int, int]:
    """Writes the .npy files row by row; returns the numbers of rows and tokens."""
    num_rows = num_tokens = 0
    dtypes = array_dtypes(source.facts)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in dtypes]

        def write_headers() -> None:
            for file, dtype in zip(files, dtypes.values(), strict=True):
                file.seek(0)
                shape = (num_rows, length)
                header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)

        write_headers()
        for tokens, segment_ids in source.rows:
            ids, *mask = tokens.reshape(length, -1).T
            rows = (ids, segment_ids, *mask)
            for file, row, dtype in zip(files, rows, dtypes.values(), strict=True):
                file.write(row.astype(dtype).tobytes())
            num_rows += 1
            num_tokens += int(np.count_nonzero(segment_ids))
        # numpy pads the header with spaces, so that the final shape fits.
        write_headers()
    return num_rows, num_tokens
