"""The tokenizer of a task, which is trained on its text if necessary.

Fingerprints of the text and of the vocabulary detect changes.
"""

import functools
import hashlib
from collections.abc import Iterable

from bpd_jax.data import corpora, example_readers
from bpd_jax.data.corpora import SourceFile
from bpd_jax.data.example_task import DataTask, ExampleTask
from bpd_jax.data.tokenizer import (
    Tokenizer,
    named_tokenizer,
    read_tokenizer_file,
    train_bpe,
)


def source_fingerprint(task: DataTask, split: str) -> str:
    """Returns a digest of the names, sizes and times of the files of a split.

    It changes when a file is added, removed or written; the text is not read. All
    splits of a `TextTask` have the same files; the files of the train split belong to
    every split if they determine a trained vocabulary. For TensorFlow Datasets, the
    result is the name and version of the data set.
    """
    if not isinstance(task, ExampleTask):
        return _files_fingerprint(corpora.corpus_files(task))
    if task.files is None:
        return task.dataset.tfds
    splits = {split} if task.trained_size is None else {split, "train"}
    files = {
        file for name in splits for file in example_readers.example_files(task, name)
    }
    return _files_fingerprint(sorted(files))


def _files_fingerprint(source_files: Iterable[SourceFile]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, path in source_files:
        status = path.stat()
        line = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def vocabulary_fingerprint(task: DataTask) -> str:
    """Returns `gpt3`, `bpe:N`, or a digest of the tokenizer file."""
    if task.vocabulary == "gpt3" or task.trained_size is not None:
        return task.vocabulary
    _, data = read_tokenizer_file(task.vocabulary)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def task_tokenizer(task: DataTask) -> Tokenizer:
    """Returns the tokenizer that `task.vocabulary` names.

    The tokenizer of `bpe:N` is trained on a sample of the train split at the first call
    in a process, and shared by later calls with the same task and text.
    """
    if task.trained_size is None:
        return named_tokenizer(task.vocabulary)
    return _trained_tokenizer(task, source_fingerprint(task, "train"))


# More text changes the vocabulary little; training on this much takes about a second.
_TRAINING_BYTES = 4_000_000


@functools.lru_cache(maxsize=4)
def _trained_tokenizer(task: DataTask, fingerprint: str) -> Tokenizer:
    del fingerprint  # Part of the cache's key: changed text trains a new tokenizer.
    assert task.trained_size is not None
    if isinstance(task, ExampleTask):
        texts = example_readers.training_texts(task, _TRAINING_BYTES)
    else:
        train = corpora.split_documents(task, "train")
        sampled_ids, _ = corpora.sample_ids(train, _TRAINING_BYTES)
        documents = corpora.split_documents(task, "train", "vocabulary")
        texts = (each.text for each in documents if each.id in sampled_ids)
    return train_bpe(texts, task.trained_size, name=task.vocabulary)
