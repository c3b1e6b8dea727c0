"""Fingerprints of a task's text and vocabulary, which detect changes."""

import hashlib
from collections.abc import Iterable

from bpd_jax.data import corpora, example_readers
from bpd_jax.data.corpora import SourceFile
from bpd_jax.data.example_task import DataTask, ExampleTask
from bpd_jax.data.tokenizer import read_tokenizer_file


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
