"""The tokenizer of a task, which is trained on the task's text if necessary."""

import functools
from collections.abc import Iterator

from bpd_jax.data import corpora, example_readers
from bpd_jax.data.example_task import DataTask, ExampleTask
from bpd_jax.data.fingerprints import source_fingerprint
from bpd_jax.data.text_task import TextTask
from bpd_jax.data.tokenizer import Tokenizer, named_tokenizer, train_bpe

# More text changes the vocabulary little; training on this much takes about a second.
_TRAINING_BYTES = 4_000_000


def task_tokenizer(task: DataTask) -> Tokenizer:
    """Returns the tokenizer that `task.vocabulary` names.

    The tokenizer of `bpe:N` is trained on a sample of the train split at the first call
    in a process, and shared by later calls with the same task and text.
    """
    if task.trained_size is None:
        return named_tokenizer(task.vocabulary)
    return _trained_tokenizer(task, source_fingerprint(task, "train"))


@functools.lru_cache(maxsize=4)
def _trained_tokenizer(task: DataTask, fingerprint: str) -> Tokenizer:
    del fingerprint  # Part of the cache's key: changed text trains a new tokenizer.
    assert task.trained_size is not None
    if isinstance(task, ExampleTask):
        texts = example_readers.training_texts(task, _TRAINING_BYTES)
    else:
        texts = _sampled_texts(task)
    return train_bpe(texts, task.trained_size, name=task.vocabulary)


def _sampled_texts(task: TextTask) -> Iterator[str]:
    train = corpora.split_documents(task, "train")
    sampled_ids, _ = corpora.sample_ids(train, _TRAINING_BYTES)
    return (
        document.text
        for document in corpora.split_documents(task, "train", "vocabulary")
        if document.id in sampled_ids
    )
