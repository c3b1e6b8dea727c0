"""Reads records of data sets that TensorFlow Datasets has prepared on this machine."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.data.example_task import Dataset, ExampleTask
from bpd_jax.data.quiet_tensorflow import seqio, tf


class TfdsSource(seqio.TfdsDataSource):
    """The records of an `ExampleTask` from TensorFlow Datasets, without downloading."""

    def __init__(self, task: ExampleTask) -> None:
        self._task = task
        limit = "" if task.max_examples is None else f"[:{task.max_examples}]"
        splits = {split: split + limit for split in task.dataset.splits}
        if task.divides_train:
            percent = min(99, max(1, round(100 - 100 * task.validation_fraction)))
            first, last = f":{percent}%", f"{percent}%:"
            if task.max_examples is not None:
                first, last = f":{task.max_examples}", f"-{task.max_examples}:"
            splits |= {"train": f"train[{first}]", "validation": f"train[{last}]"}
        super().__init__(
            task.dataset.tfds,
            tfds_data_dir=task.data_dir,
            splits=splits,
            read_only=True,
        )

    def get_dataset(self, split: str, *args: Any, **kwargs: Any) -> tf.data.Dataset:
        """Returns the records, if train and validation records do not overlap."""
        splits = self.tfds_dataset.info.splits
        if splits and self._task.source_split(split) not in splits:
            raise self._missing(split)
        name, limit = self._task.dataset.tfds, self._task.max_examples
        if limit is not None and self._task.divides_train and "train" in splits:
            total = splits["train"].num_examples
            if total and total < 2 * limit:
                raise UserError(
                    f"max_examples is {limit}, but the train split of {name} has only "
                    f"{total} records for training and validation: leave max_examples "
                    "out."
                )
        try:
            return super().get_dataset(split, *args, **kwargs)
        except AssertionError as error:
            raise self._missing(split) from error

    def list_shards(self, split: str) -> Sequence[str]:
        """Returns the names of the files of a split; raises as `get_dataset`."""
        if self._task.source_split(split) not in self.tfds_dataset.info.splits:
            raise self._missing(split)
        return super().list_shards(split)

    def num_input_examples(self, split: str) -> int | None:
        """Returns the number of records in a split; None if it is unknown."""
        splits = self.tfds_dataset.info.splits
        # Mocked and some very large data sets do not state it, or state 0.
        source = self._task.source_split(split)
        if source not in splits or not splits[source].num_examples:
            return None
        return super().num_input_examples(split)

    def _missing(self, split: str) -> UserError:
        name, folder = self._task.dataset.tfds, self.tfds_dataset.builder.data_dir
        return UserError(
            f"TensorFlow Datasets has not prepared the {split} split of {name} in "
            f"{folder}: run `tfds build {name}`, set data_dir to the folder that "
            "contains it, or set files to JSON Lines."
        )


def write_prompts(dataset: tf.data.Dataset, source: Dataset) -> tf.data.Dataset:
    """Converts records of the data set `source` to `targets` and, if any, `inputs`.

    Records without a target are omitted.
    """

    def write(record: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        field, _, list_name = source.target.partition("/")
        target = record[field]
        if list_name:
            answers = target[list_name]
            target = tf.cond(tf.size(answers) > 0, lambda: answers[0], lambda: "")
        texts = {"targets": target}
        if source.prompt is not None:
            texts["inputs"] = tf.strings.join(
                [
                    part
                    for literal, name in source.prompt_parts
                    for part in ([literal, record[name]] if name else [literal])
                ]
            )
        return texts

    dataset = dataset.map(write, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.filter(lambda texts: tf.strings.length(texts["targets"]) > 0)


def tfds_examples(
    task: ExampleTask, split: str
) -> Iterator[tuple[str, str | None, str]]:
    """Yields id, inputs and targets of the examples of a split; see `Example`."""
    task.check_split(split)
    records = TfdsSource(task).get_dataset(split, shuffle=False)
    written = write_prompts(records, task.dataset).as_numpy_iterator()
    number = 0
    for number, texts in enumerate(written, 1):
        inputs = texts["inputs"].decode() if task.has_inputs else None
        yield str(number), inputs, texts["targets"].decode()
    if not number:
        raise UserError(f"the {split} split of {task.dataset.tfds} is empty.")


def tfds_records(task: ExampleTask, split: str) -> Iterator[dict[str, Any]]:
    """Yields the records of a split with all their fields, as JSON values."""
    records = TfdsSource(task).get_dataset(split, shuffle=False)
    for record in records.as_numpy_iterator():
        yield _plain(record)


def _plain(value: Any) -> Any:
    """Converts nested bytes to texts and arrays to lists.

    >>> _plain({"answers": {"text": np.array([b"so"], object)}})
    {'answers': {'text': ['so']}}
    """
    if isinstance(value, dict):
        return {name: _plain(field) for name, field in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return value.decode() if isinstance(value, bytes) else value
