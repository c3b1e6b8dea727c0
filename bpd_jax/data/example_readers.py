"""Reads the examples of a task as texts.

JSON Lines are read without heavy libraries; TensorFlow Datasets is imported only when
examples are read from it.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bpd_jax.base.errors import UserError
from bpd_jax.data import corpora, text_readers
from bpd_jax.data.corpora import EmptySplitError, SourceFile
from bpd_jax.data.example_task import ALL_SPLITS, SPLIT, ExampleTask
from bpd_jax.data.text_task import SPLITS
from bpd_jax.storage.paths import as_path


class Example(NamedTuple):
    """One example; `inputs` is None for language modelling."""

    id: str
    inputs: str | None
    targets: str

    @property
    def text(self) -> str:
        """Inputs and targets, separated by a line break."""
        return self.targets if self.inputs is None else f"{self.inputs}\n{self.targets}"


def example_files(task: ExampleTask, split: str) -> list[SourceFile]:
    """Returns the files that contain the examples of a split, sorted by name."""
    task.check_split(split)
    assert task.files is not None
    source = task.source_split(split)
    matches = corpora.matched_files(task.files.replace(SPLIT, source), "files")
    for file in matches:
        if not text_readers.is_json_lines(file.path):
            raise UserError(
                f"{file.path} of files={task.files!r} is not JSON Lines: its name must "
                "end in .jsonl or .jsonl.gz."
            )
    return matches


def check_source(task: ExampleTask) -> None:
    """Checks that the data set is on this machine.

    A folder under `gs://` is not looked at. TensorFlow is not imported.
    """
    if task.files is not None:
        example_files(task, "train")
        return
    root = task.data_dir or os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    name = task.dataset.tfds
    folder = as_path(root) / name.replace(":", "/")
    if not root.startswith("gs://") and not (folder / "dataset_info.json").is_file():
        raise UserError(
            f"{folder} does not exist or is incomplete: run `tfds build {name}`, set "
            "data_dir to the folder that contains it, or set files to JSON Lines."
        )


def existing_splits(task: ExampleTask) -> tuple[str, ...]:
    """The splits for which there are files; for TensorFlow Datasets, all splits."""
    if not task.has_split_files:
        return task.splits
    existing = []
    for split in ALL_SPLITS:
        with contextlib.suppress(UserError):
            example_files(task, split)
            existing.append(split)
    return tuple(existing)


def read_records(
    task: ExampleTask, split: str, among: Iterable[SourceFile] | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the id and the texts of each record of JSON Lines that has a target.

    The records are in the order of files and lines; ids are unique in a split. `among`
    are some of the split's files; by default all.
    """
    dataset, count = task.dataset, 0
    by_hash = not task.has_split_files or (task.divides_train and split in SPLITS)
    for name, path in example_files(task, split) if among is None else among:
        for number, values in text_readers.read_json_fields(
            path, dataset.fields, dataset.target
        ):
            texts = {field: "".join(value[:1]) for field, value in values.items()}
            own_split = corpora.split_of(texts[dataset.topic], task.validation_fraction)
            if texts[dataset.target] and (not by_hash or split == own_split):
                yield f"{name}:{number}", texts
                count += 1
                if count == task.max_examples:
                    return
    if among is None and not count:
        raise EmptySplitError(
            f"the {split} split of {task.name} is empty: no record of files="
            f"{task.files!r} with a target in the field {dataset.target!r} is in "
            "it",
            f"give more records, another validation_fraction, or a file per split by "
            f"writing {SPLIT} in files.",
        )


def read_examples(task: ExampleTask, split: str) -> Iterator[Example]:
    """Yields the examples of a split, in the order of its source."""
    if task.files is None:
        # TensorFlow takes seconds to import and may not be installed.
        from bpd_jax.data.tfds_source import tfds_examples

        for fields in tfds_examples(task, split):
            yield Example(*fields)
        return
    for record_id, texts in read_records(task, split):
        inputs = task.dataset.inputs(texts)
        yield Example(record_id, inputs, texts[task.dataset.target])


def training_texts(task: ExampleTask, max_bytes: int) -> Iterator[str]:
    """Yields about `max_bytes` of texts from the beginning of the train split."""
    for example in read_examples(task, "train"):
        yield example.text
        max_bytes -= len(example.text.encode("utf-8"))
        if max_bytes <= 0:
            return
