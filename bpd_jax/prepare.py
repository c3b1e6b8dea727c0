"""Prepares the packed rows of a task for hosts without TensorFlow, or caches tokens.

    python -m bpd_jax.prepare --task=squad --files='squad/{split}.jsonl.gz' \\
        --split=train --length=2048 --output=runs/squad/data/train
    python -m bpd_jax.prepare --task=c4 --data_dir=/data/tfds --length=512 \\
        --num_shards=1024 --shard=3 --output=runs/c4/data/train
    python -m bpd_jax.prepare --gin_file=gin_configs/tasks/c4.gin --length=512 \\
        --num_shards=1024 --shard=3 --output=runs/c4/data/train

A run in `--workdir=runs/squad` reads the rows of a split from `runs/squad/data/SPLIT`.
Existing rows are skipped. Shards can be prepared on different machines.

With --cache_dir and without --output, a Beam pipeline tokenizes all splits into seqio's
cache; with both, the rows are prepared from the cache:

    python -m bpd_jax.prepare --task=squad --cache_dir=cache \\
        --beam_options='--runner=DirectRunner --direct_num_workers=2'
    python -m bpd_jax.prepare --task=squad --cache_dir=cache --length=2048 \\
        --output=runs/squad/data/train
"""

import time
from typing import Any

from absl import flags

from bpd_jax.base import cli, configuration
from bpd_jax.base.configuration import Parsed
from bpd_jax.base.errors import UserError
from bpd_jax.data.example_task import DATASETS, DataTask, ExampleTask
from bpd_jax.data.row_preparation import prepare_rows
from bpd_jax.data.row_sources import Shard
from bpd_jax.data.text_task import CORPORA, TextTask
from bpd_jax.training.config import TrainConfig  # noqa: F401  # Files may set it.

_TASK = flags.DEFINE_string(
    "task",
    None,
    f"What to prepare: {', '.join([*DATASETS, *CORPORA])}. For text_files, --files is "
    "the glob of text files.",
)
_SPLIT = flags.DEFINE_string("split", "train", "Split to prepare.")
_LENGTH = flags.DEFINE_integer("length", None, "Tokens of a row.")
_OUTPUT = cli.DEFINE_path("output", None, "Folder for the rows.")
_NUM_SHARDS = flags.DEFINE_integer(
    "num_shards", 1, "Number of shards of the split, each in a folder in --output."
)
_SHARD = flags.DEFINE_integer("shard", None, "Index of the shard to prepare, from 0.")
_CACHE_DIR = cli.DEFINE_path(
    "cache_dir", None, "Folder of seqio's caches; written, or with --output read."
)
_BEAM_OPTIONS = flags.DEFINE_string(
    "beam_options",
    "",
    "Options of the pipeline that writes the cache, separated by spaces: "
    "'--runner=DataflowRunner --region=…'.",
)

# Fields of the task that are flags.
_FIELDS = ("files", "data_dir", "vocabulary", "validation_fraction", "max_examples")
cli.define_flags(ExampleTask, *_FIELDS)


def main() -> None:
    """Prepares rows or a cache and prints a summary."""
    begin = time.perf_counter()
    task = _task()
    if not _OUTPUT.value:
        if not _CACHE_DIR.value:
            raise UserError(
                "--output or --cache_dir is missing: give the folder for the rows."
            )
        if not isinstance(task, ExampleTask):
            raise UserError(
                f"seqio's cache holds data sets, not the corpus {task.corpus}: give "
                "--output and --length instead of --cache_dir."
            )
        # Imported late: rows of text do not need TensorFlow.
        from bpd_jax.data.cache_pipeline import cache_task

        folder = cache_task(task, _CACHE_DIR.value, _BEAM_OPTIONS.value.split())
        print(f"{folder}: {time.perf_counter() - begin:.1f} seconds")
        return
    if _BEAM_OPTIONS.value:
        raise UserError("--beam_options require --cache_dir without --output.")
    if _LENGTH.value is None:
        raise UserError("--length is missing: give the tokens of a row, such as 512.")
    count = _NUM_SHARDS.value
    if count < 1:
        raise UserError(f"--num_shards is {count}: it must be 1 or more.")
    if _SHARD.value is None and count > 1:
        raise UserError(
            f"--shard is missing: give one of 0 to {count - 1}, and run the command "
            "for each."
        )
    shard = Shard(_SHARD.value or 0, count)
    rows = prepare_rows(
        task, _SPLIT.value, _LENGTH.value, _OUTPUT.value, shard, _CACHE_DIR.value
    )
    print(
        f"{len(rows):,} rows of {rows.length:,} tokens: {rows.num_tokens:,} tokens of "
        f"{rows.num_documents:,} texts, {rows.waste:.1%} padding"
    )
    if cut := rows.truncation:
        print(
            f"truncated: the inputs of {cut['inputs']:,} and the targets of "
            f"{cut['targets']:,} examples, {cut['tokens']:,} tokens in total"
        )
    print(f"{rows.folder}: {time.perf_counter() - begin:.1f} seconds")


def _task() -> DataTask:
    """The task that the gin files or the flags name."""
    if flags.FLAGS.gin_file:
        task_flags = [n for n in ("task", *_FIELDS) if flags.FLAGS[n].present]
        if task_flags:
            raise UserError(
                f"--{task_flags[0]} cannot be combined with --gin_file: set it with "
                "gin, as in --gin.ExampleTask.max_examples=100."
            )
        parsed: Parsed[Any] = configuration.parse_flags(ExampleTask, TextTask)
        return parsed.value
    name, fields = cli.required("task"), cli.flag_values(ExampleTask)
    if name in DATASETS:
        return ExampleTask(name, **fields)
    if name not in CORPORA:
        names = ", ".join([*DATASETS, *CORPORA])
        raise UserError(f"unknown task {name!r}: choose one of {names}.")
    for field in ("data_dir", "max_examples"):
        if field in fields:
            raise UserError(f"--{field} cannot be combined with --task={name}.")
    return TextTask(name, fields.pop("files", None), **fields)


if __name__ == "__main__":
    cli.run(main)
