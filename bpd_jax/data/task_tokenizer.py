"""The tokenizer of a task, which may have to be trained on the task's own text."""

import functools
import hashlib
from collections.abc import Iterator

from bpd_jax import files
from bpd_jax.data import corpora, examples
from bpd_jax.data.example_task import DataTask, ExampleTask
from bpd_jax.data.text_task import TextTask
from bpd_jax.data.tokenizer import (
    Tokenizer,
    named_tokenizer,
    tokenizer_file,
    train_bpe,
)
from bpd_jax.errors import UserError

# A vocabulary trained on more text differs little; this much takes about a second.
_TRAINING_BYTES = 4_000_000


def task_tokenizer(task: DataTask) -> Tokenizer:
    """Returns the tokenizer that `task.vocabulary` names.

    A `bpe:N` is trained on a sample of the train split at the first call in a
    process; later calls with the same task and the same text share it.
    """
    if task.trained_size is None:
        return named_tokenizer(task.vocabulary)
    if isinstance(task, ExampleTask):
        return _trained_tokenizer(task, examples.source_digest(task, "train"))
    return _trained_tokenizer(task, corpora.source_digest(task))


@functools.lru_cache(maxsize=4)
def _trained_tokenizer(task: DataTask, source_digest: str) -> Tokenizer:
    del source_digest  # Part of the key: a changed corpus is trained on anew.
    assert task.trained_size is not None
    if isinstance(task, ExampleTask):
        texts = examples.training_texts(task, _TRAINING_BYTES)
    else:
        texts = _sampled_texts(task)
    return train_bpe(texts, task.trained_size, name=task.vocabulary)


def _sampled_texts(task: TextTask) -> Iterator[str]:
    train = corpora.split_documents(task, "train")
    chosen, _ = corpora.sample_ids(train, _TRAINING_BYTES)
    return (
        document.text
        for document in corpora.split_documents(task, "train", "vocabulary")
        if document.id in chosen
    )


def vocabulary_key(task: DataTask) -> str:
    """Returns what tells vocabularies of one corpus apart; trains nothing."""
    if task.vocabulary == "gpt3" or task.trained_size is not None:
        return task.vocabulary
    path = tokenizer_file(task.vocabulary)
    try:
        return hashlib.blake2b(files.read_bytes(path), digest_size=16).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not a tokenizer.json: {error}.") from error
