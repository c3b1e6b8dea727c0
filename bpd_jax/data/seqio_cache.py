"""Reads the tokens of a task from seqio's cache, which `cache_pipeline` writes.

The cache of a task is a folder of TFRecord files below `cache_dir`, as seqio has it; so
any program that uses seqio reads it, with `use_cached=True`.
"""

import dataclasses
import json
import os
from typing import Any

from bpd_jax.data import corpora, examples
from bpd_jax.data.example_task import DataTask, ExampleTask
from bpd_jax.data.quiet_tensorflow import seqio, tf
from bpd_jax.data.task_tokenizer import vocabulary_key
from bpd_jax.data.text_task import SPLITS
from bpd_jax.errors import UserError

# Describes the source of the cache, beside the files of a split.
ABOUT = "task.json"
COMPLETED = "COMPLETED"


def use_cache(task: DataTask, cache_dir: str) -> None:
    """Lets `use_cached=True` of the task's seqio task read from `cache_dir`.

    Raises:
      UserError: the task is not cached there, or the cache is that of another task.
    """
    folder = cache_folder(task, cache_dir)
    if not is_complete(folder):
        raise UserError(
            f"{cache_dir} holds no complete cache of {_name(task)}: make it with "
            "python -m bpd_jax.prepare --cache_dir and without --output."
        )
    check_fits(task, folder)
    # seqio uses the first folder that contains the task.
    seqio.set_global_cache_dirs([cache_dir])


def _name(task: DataTask) -> str:
    return task.seqio_name if isinstance(task, ExampleTask) else task.name


def cache_folder(task: DataTask, cache_dir: str) -> str:
    """The folder of a task's cache."""
    return os.path.join(cache_dir, seqio.get_task_dir_from_name(_name(task)))


def is_complete(folder: str) -> bool:
    """Whether a pipeline has completed the folder."""
    return tf.io.gfile.exists(os.path.join(folder, COMPLETED))


def splits_of(task: DataTask) -> tuple[str, ...]:
    """The names of the cached splits."""
    return examples.found_splits(task) if isinstance(task, ExampleTask) else SPLITS


def about(task: DataTask) -> dict[str, Any]:
    """The settings that a cache depends on, as JSON values."""
    if isinstance(task, ExampleTask):
        sources = {
            split: examples.source_digest(task, split) for split in splits_of(task)
        }
    else:
        sources = {"all": corpora.source_digest(task)}
    fields = dataclasses.asdict(task)
    for name in ("data_dir", "packed"):  # The tokens do not depend on these settings.
        fields.pop(name, None)
    if fields.get("validation_from") == "validation":
        fields.pop("validation_from")  # Earlier caches lack this setting.
    return {
        **fields,
        "vocabulary": vocabulary_key(task),
        "sources": sources,
    }


def check_fits(task: DataTask, folder: str) -> None:
    """Raises a `UserError` unless the folder is the cache of this task."""
    path = os.path.join(folder, ABOUT)
    try:
        with tf.io.gfile.GFile(path) as file:
            saved = json.load(file)
    except (tf.errors.NotFoundError, ValueError) as error:
        raise UserError(
            f"cannot read {path}: {folder} was not made by bpd_jax.prepare, or is "
            "damaged; name another folder."
        ) from error
    for name, expected in about(task).items():
        if saved.get(name) != expected:
            raise UserError(
                f"{folder} is the cache of another task: {name} is "
                f"{saved.get(name)!r} there and {expected!r} here; name another "
                "folder, or remove it."
            )
