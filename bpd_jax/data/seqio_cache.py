"""Reads the tokens of a task from seqio's cache, which `cache_pipeline` writes.

The cache of a task is a folder of TFRecord files in `cache_dir`, in seqio's layout, so
that any program that uses seqio can read it with `use_cached=True`.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from bpd_jax.base import reading
from bpd_jax.base.errors import UserError
from bpd_jax.data import seqio_tasks
from bpd_jax.data.example_readers import existing_splits
from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.quiet_tensorflow import seqio, tf
from bpd_jax.data.task_tokenizer import source_fingerprint, vocabulary_fingerprint
from bpd_jax.storage.paths import check_plain

# The file that describes the source of the cache.
DESCRIPTION = "task.json"
COMPLETED = "COMPLETED"
_MOST_DESCRIPTION = 1 << 20  # bytes

# Exceptions of seqio and TensorFlow for damaged files.
_DAMAGE = (
    *(tf.errors.OpError, ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)


def use_cache(task: ExampleTask, cache_dir: str) -> None:
    """Makes `use_cached=True` of the task's seqio task read from `cache_dir`."""
    folder = cache_folder(task, cache_dir)
    if not is_complete(folder):
        raise UserError(
            f"{cache_dir} has no complete cache of {task.seqio_name}: create it with "
            "python -m bpd_jax.prepare --cache_dir and without --output."
        )
    check_fits(task, folder)
    # seqio uses the first folder that contains the task.
    seqio.set_global_cache_dirs([cache_dir])


def read_examples(
    task: ExampleTask, cache_dir: str, split: str, shard: seqio.ShardInfo | None
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the cached examples of a split, or of one of its shards."""
    use_cache(task, cache_dir)
    folder, seqio_task = cache_folder(task, cache_dir), seqio_tasks.get_task(task)
    number = 0
    try:
        # seqio reads the files that it finds.
        path = seqio.get_cached_info_path(folder, split)
        with tf.io.gfile.GFile(path, "rb") as file:
            expected = reading.parse_json(file.read(_MOST_DESCRIPTION))["num_shards"]
        prefix = seqio.get_cached_tfrecord_prefix(folder, split)
        num_files = len(tf.io.gfile.glob(f"{prefix}-*-of-*"))
        if num_files != expected:
            found = f"{num_files} of {expected} files"
            raise ValueError(f"it has {found} of the split {split}")
        dataset = seqio_task.get_dataset(
            split=split, shuffle=False, use_cached=True, shard_info=shard
        )
        for example in dataset.as_numpy_iterator():
            number += 1
            yield example
        # TensorFlow reads a file that was cut to nothing without an error.
        expected = seqio_task.get_cached_stats(split)["examples"]
        if shard is None and number != expected:
            raise ValueError(f"it has {number} of {expected} examples")
    except _DAMAGE as error:
        line = str(error).strip().partition("\n")[0][:200].rstrip(".")
        raise UserError(
            f"cannot read the cache {folder} ({line or type(error).__name__}). If it "
            "is damaged, remove it and create it again."
        ) from error


def cache_folder(task: ExampleTask, cache_dir: str) -> str:
    """The folder of a task's cache."""
    check_plain(cache_dir, "TensorFlow")
    return os.path.join(cache_dir, seqio.get_task_dir_from_name(task.seqio_name))


def is_complete(folder: str) -> bool:
    """Whether a pipeline has completed the folder."""
    return tf.io.gfile.exists(os.path.join(folder, COMPLETED))


def describe(task: ExampleTask) -> dict[str, Any]:
    """The settings and sources that a cache depends on, as JSON values."""
    fields = dataclasses.asdict(task)
    for name in ("data_dir", "packed"):  # The tokens do not depend on these settings.
        fields.pop(name, None)
    if fields.get("validation_from") == "validation":
        fields.pop("validation_from")  # Earlier caches lack this setting.
    sources = {
        split: source_fingerprint(task, split) for split in existing_splits(task)
    }
    vocabulary = vocabulary_fingerprint(task)
    return {**fields, "vocabulary": vocabulary, "sources": sources}


def check_fits(task: ExampleTask, folder: str) -> None:
    """Checks that the folder is the cache of this task."""
    path = os.path.join(folder, DESCRIPTION)
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            # A device file may be endless.
            content = file.read(_MOST_DESCRIPTION + 1)
        if len(content) > _MOST_DESCRIPTION:
            raise ValueError(f"it has more than {_MOST_DESCRIPTION:,} bytes")
        saved = reading.parse_json(content)
        if not isinstance(saved, dict):
            raise ValueError("it is not an object")
    except (tf.errors.OpError, ValueError) as error:
        raise UserError(
            f"cannot read {path}: {folder} was not written by bpd_jax.prepare, or is "
            "damaged; name another folder."
        ) from error
    for name, expected in describe(task).items():
        if saved.get(name) != expected:
            raise UserError(
                f"{folder} is the cache of another task: {name} is "
                f"{saved.get(name)!r} there and {expected!r} here; name another "
                "folder, or remove it."
            )
