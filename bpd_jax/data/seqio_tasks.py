"""seqio tasks of data sets: token ids of documents and of examples.

A data set without a prompt consists of documents. It has one feature, `targets`: the
tokens of a document between two end-of-text tokens E. With a sequence length, documents
are split into consecutive pieces of at most this length:

    tokens of a document      5 6 7
    without sequence length   E 5 6 7 E
    sequence length 3         E 5 6 | 7 E

The examples of a data set with a prompt also have `inputs`, which begin with E and end
with the separator s, and their `targets` end with E; `packing` concatenates
them.

    inputs   E question: … context: … s
    targets  an answer E

The tasks `squad.gpt3`, `c4.gpt3`, …, one per data set of `example_task.DATASETS`, are
registered; they read TensorFlow Datasets.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.data.example_readers import example_files, read_records
from bpd_jax.data.example_task import DATASETS, SEPARATOR, ExampleTask
from bpd_jax.data.quiet_tensorflow import seqio, tf
from bpd_jax.data.seqio_vocabulary import TokenizerVocabulary
from bpd_jax.data.task_tokenizer import task_tokenizer
from bpd_jax.data.text_task import CORPORA
from bpd_jax.data.tfds_source import TfdsSource, write_prompts
from bpd_jax.data.tokenizer import Tokenizer, named_tokenizer

__all__ = ["examples", "features_of", "get_task", "register", "token_documents"]


class _JsonLinesSource(seqio.DataSource):
    """The records of JSON Lines in the form of TensorFlow Datasets, in their order.

    `answers/text` is the list `text` in the object `answers`. Every file is a shard.

    Attributes:
      error: the `UserError` that ended the last iteration, or None; see `examples`.
    """

    def __init__(self, task: ExampleTask) -> None:
        super().__init__(splits=task.splits)
        self._task = task
        self.error: UserError | None = None

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """False: if there are fewer shards than readers, seqio divides the records."""
        return False

    def list_shards(self, split: str) -> Sequence[str]:
        """Returns the names of the shards."""
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
        """Returns the records."""
        del shuffle, seed, unused
        task, shard = self._task, shard_info

        def nested(path: str, text: Any, texts: Any) -> tuple[str, Any]:
            field, _, list_name = path.partition("/")
            return field, {list_name: texts} if list_name else text

        def read() -> Iterator[dict[str, Any]]:
            self.error, among = None, None
            try:
                if shard is not None and shard.num_shards > 1:
                    among = example_files(task, split)[shard.index :: shard.num_shards]
                for _, texts in read_records(task, split, among):
                    pairs = [(path, text.encode()) for path, text in texts.items()]
                    yield dict(nested(path, text, [text]) for path, text in pairs)
            except UserError as error:
                self.error = error
                raise

        text, texts = tf.TensorSpec([], tf.string), tf.TensorSpec([None], tf.string)
        signature = dict(nested(path, text, texts) for path in task.dataset.fields)
        return tf.data.Dataset.from_generator(read, output_signature=signature)


# Number of texts that are tokenized together, in parallel.
_BATCH = 32

Features = Mapping[str, seqio.Feature]


def _tokenize(dataset: tf.data.Dataset, output_features: Features) -> tf.data.Dataset:
    """Tokenizes the texts of all features."""
    dataset = dataset.batch(_BATCH).map(
        lambda example: {
            name: feature.vocabulary.encode_tf(example[name])
            for name, feature in output_features.items()
        },
        num_parallel_calls=2,
        deterministic=True,
    )
    return dataset.unbatch()


def _cut_targets(
    dataset: tf.data.Dataset, sequence_length: Mapping[str, int] | None = None
) -> tf.data.Dataset:
    """Splits documents into pieces of `sequence_length["targets"]` tokens, if given."""
    if not sequence_length:
        return dataset
    length = sequence_length["targets"]
    pieces = tf.data.Dataset.from_tensor_slices
    return dataset.flat_map(lambda example: pieces(example).batch(length))


def _frame(
    dataset: tf.data.Dataset, output_features: Features, has_inputs: bool
) -> tf.data.Dataset:
    """Adds the end-of-text token E around a document or an example.

    Documents `x y` become `E x y E`, so that the model predicts the first token, too.
    Inputs `a b` become `E a b s` with the separator s, and targets `x y` become
    `x y E`; a row contains their concatenation.
    """
    end = [output_features["targets"].vocabulary.eos_id]

    def frame(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        before = [] if has_inputs else [end]
        framed = {"targets": tf.concat([*before, example["targets"], end], 0)}
        # `token_documents` requests only the targets.
        if "inputs" in output_features:
            separator = output_features["inputs"].vocabulary.encode(SEPARATOR)
            framed["inputs"] = tf.concat([end, example["inputs"], separator], 0)
        return framed

    return dataset.map(frame, num_parallel_calls=tf.data.AUTOTUNE)


def get_task(task: ExampleTask) -> seqio.Task:
    """Returns the seqio task of a data set, without registering it."""
    source = TfdsSource(task) if task.files is None else _JsonLinesSource(task)
    has_inputs = task.has_inputs
    return seqio.Task(
        task.seqio_name,
        source=source,
        output_features=features_of(
            functools.partial(task_tokenizer, task),
            ("inputs", "targets") if has_inputs else ("targets",),
        ),
        preprocessors=[
            functools.partial(write_prompts, source=task.dataset),
            _tokenize,
            functools.partial(_frame, has_inputs=has_inputs),
            seqio.CacheDatasetPlaceholder(),
            *([] if has_inputs else [_cut_targets]),
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
    """
    try:
        yield from dataset.as_numpy_iterator()
    except tf.errors.OpError:
        error = getattr(source, "error", None)
        if error is None:
            raise
        raise error from None


def register(task: ExampleTask) -> seqio.Task:
    """Registers the seqio task of a task; replaces another task of the same name.

    seqio's Beam pipeline refers to tasks by name. Its workers call this function from
    many threads, so a task that is already registered is not replaced.
    """
    with _lock:
        seqio_task = get_task(task)
        if _registered.get(seqio_task.name) != task:
            if seqio_task.name in seqio.TaskRegistry.names():
                seqio.TaskRegistry.remove(seqio_task.name)
            seqio.TaskRegistry.add_provider(seqio_task.name, seqio_task)
            _registered[seqio_task.name] = task
        return seqio.TaskRegistry.get(seqio_task.name)


_lock = threading.Lock()
_registered: dict[str, ExampleTask] = {}


def token_documents(name: str, split: str, vocabulary: str) -> Iterator[np.ndarray]:
    """Yields the token ids of the targets of a registered seqio task, `[n]` int32.

    End-of-text tokens at the beginning and the end are omitted.

    Args:
      name: a task with the feature `targets` and a preprocessor that tokenizes it with
        its vocabulary, such as `seqio.preprocessors.tokenize`.
      split: a split of the task.
      vocabulary: replaces the vocabulary of the task; `gpt3`, or the path of a
        tokenizer.json.
    """
    registered = seqio.TaskRegistry.names()
    if name not in registered:
        names = ", ".join([*CORPORA, *sorted(registered)])
        raise UserError(f"unknown task {name!r}: use one of {names}.")
    task = seqio.TaskRegistry.get(name)
    if "targets" not in task.output_features or split not in task.splits:
        raise UserError(
            f"the seqio task {name} has no targets in a split {split!r}: use a task "
            f"with the feature 'targets'; its splits are {' and '.join(task.splits)}."
        )
    features = features_of(functools.partial(named_tokenizer, vocabulary))
    task = task.replace(output_features=features)
    end = features["targets"].vocabulary.eos_id
    dataset = task.get_dataset(split=split, shuffle=False)
    for example in examples(dataset, task.source):
        tokens = example["targets"]
        first = int(len(tokens) > 0 and tokens[0] == end)
        last = len(tokens) - int(len(tokens) > first and tokens[-1] == end)
        yield tokens[first:last]


for _name in DATASETS:
    register(ExampleTask(_name))
