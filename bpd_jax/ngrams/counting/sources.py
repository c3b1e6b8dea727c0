"""Sources of token sequences for n-gram models.

A source is read in batches of complete sequences in a fixed order, so that an
interrupted count can resume after any sequence.
"""

import abc
import copy
import hashlib
import inspect
import itertools
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.data import corpora, generations, packing, text_task, tokenizer
from bpd_jax.data.corpora import SourceFile
from bpd_jax.data.task_tokenizer import (
    source_fingerprint,
    task_tokenizer,
    vocabulary_fingerprint,
)
from bpd_jax.data.text_task import TextTask
from bpd_jax.ngrams import parallel, trie
from bpd_jax.ngrams.counting import token_files
from bpd_jax.ngrams.counting.windows import TokenBatch, join
from bpd_jax.storage.paths import matching

# Threads that call the tokenizer: while one batch is tokenized, another is converted to
# arrays and a third is read.
_TOKENIZING = 2
# Documents of a batch of a registered task.
_BATCH_DOCUMENTS = 256
# Bytes of text files of a share of a source.
_SHARE_BYTES = 1 << 26


class TokenSource(abc.ABC):
    """A source of token sequences.

    Attributes:
      name: name in error messages.
      vocab_size: V.
      end_of_text: the token that separates sequences, or None.
    """

    def __init__(self, name: str, vocab_size: int, end_of_text: int | None) -> None:
        trie.check_vocab_size(vocab_size, name)
        self.name = name
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text

    @abc.abstractmethod
    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        """Yields batches of the sequences after the first `skip`."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Returns a digest that identifies the sequences, without reading text."""

    def shares(self) -> "list[TokenSource]":
        """Splits the source into sources that can be read on different machines.

        They can be pickled.
        """
        raise UserError(
            f"{self.name} can only be read sequentially and cannot be split: use text "
            "or tokens."
        )

    def sequences(self) -> Iterator[np.ndarray]:
        """Yields every sequence, `[tokens]` int32."""
        for tokens, lengths in self.batches():
            yield from np.split(tokens, np.cumsum(lengths[:-1]))


def open_source(
    *,
    task: str | None = None,
    text: str | None = None,
    tokens: str | None = None,
    generations: str | None = None,
    answers_only: bool = False,
    split: str | None = None,
    vocabulary: str = "gpt3",
    max_bytes: int | None = None,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
) -> TokenSource:
    """Opens a source: exactly one of task, text, tokens and generations.

    The arguments are fields of `build_settings.CountSettings`.
    """
    if tokens:
        return TokenFiles.open(tokens, vocab_size, end_of_text)
    if generations:
        return GeneratedTexts(generations, split or "train", answers_only)
    name = task or "text_files"
    split = split or ("all" if text else "train")
    if name in text_task.CORPORA:
        return TextSource(TextTask(name, text, vocabulary, max_bytes=max_bytes), split)
    if max_bytes is not None:
        raise UserError(
            f"max_bytes applies to the tasks {' and '.join(text_task.CORPORA)}, not to "
            f"{name!r}."
        )
    return RegisteredTask(name, split, vocabulary)


def source_of(settings: object) -> TokenSource:
    """Opens the source described by the attributes of `settings`."""
    names = inspect.signature(open_source).parameters
    return open_source(**{name: getattr(settings, name) for name in names})


class TokenFiles(TokenSource):
    """Files of token ids, one after the other."""

    def __init__(
        self,
        name: str,
        paths: Sequence[pathlib.Path],
        vocab_size: int,
        end_of_text: int | None,
    ) -> None:
        """Creates a source of files, which are read in the given order."""
        super().__init__(name, vocab_size, end_of_text)
        self._paths = paths

    @classmethod
    def open(
        cls, pattern: str, vocab_size: int | None, end_of_text: int | None
    ) -> "TokenFiles":
        """Finds the files, and the highest id if V is not given."""
        _, paths = matching(pattern, "tokens")
        if vocab_size is None:
            highest = [token_files.highest_id(path) for path in paths]
            vocab_size = 1 + max(*highest, -1 if end_of_text is None else end_of_text)
        return cls(pattern, paths, vocab_size, end_of_text)

    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        """Yields the sequences of the files, in the order of their names."""
        for path in self._paths:
            for tokens, lengths in token_files.read_batches(path, self.end_of_text):
                if skip < lengths.size:
                    first = int(lengths[:skip].sum())
                    yield TokenBatch(tokens[first:], lengths[skip:])
                skip = max(skip - lengths.size, 0)

    def fingerprint(self) -> str:
        """Returns a digest of the settings and of the files' names, sizes and times."""
        status = [(path.name, path.stat()) for path in self._paths]
        files = [(name, of.st_size, of.st_mtime_ns) for name, of in status]
        return _digest(self.vocab_size, self.end_of_text, files)

    def shares(self) -> list[TokenSource]:
        """Returns a source per file."""
        return [
            TokenFiles(str(path), [path], self.vocab_size, self.end_of_text)
            for path in self._paths
        ]


class GeneratedTexts(TokenSource):
    """Texts generated by a model: each text, or each answer, is a sequence."""

    def __init__(self, folder: str, split: str, answers_only: bool = False) -> None:
        """Opens a split of a folder of generated texts; see `TextTask`."""
        self._texts = generations.open_generations(folder)
        self._task = text_task.TextTask(
            text_task.GENERATIONS, folder, vocabulary=folder
        )
        self._task.check_split(split)
        self._split, self._answers_only = split, answers_only
        self._rows = packing.split_texts(
            self._texts, split, self._task.validation_fraction
        )
        if answers_only:
            answered = self._texts.lengths > self._texts.prompt_lengths
            self._rows = [row for row in self._rows if answered[row]]
        end = packing.end_token(self._texts)
        super().__init__(folder, self._texts.vocab_size, end)

    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        """Yields the texts, in the order of the folder."""
        rows = iter(self._rows[skip:])
        begins = self._texts.prompt_lengths * self._answers_only
        while batch := list(itertools.islice(rows, _BATCH_DOCUMENTS)):
            yield join([self._texts[row][begins[row] :] for row in batch])

    def fingerprint(self) -> str:
        """Returns a digest of the split and of the files' names, sizes and times."""
        files = source_fingerprint(self._task, self._split)
        return _digest(self._task, self._split, self._answers_only, files)


class TextSource(TokenSource):
    """Documents of a corpus, read and tokenized on all cores."""

    def __init__(self, task: TextTask, split: str) -> None:
        """Opens a split of a corpus."""
        task.check_split(split)
        encoder = task_tokenizer(task)
        name = task.text_files or task.corpus
        super().__init__(name, encoder.vocab_size, encoder.end_of_text)
        self._task = task
        self._split = split
        self._files: tuple[SourceFile, ...] | None = None  # None for all files.

    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        """Yields the documents, by file name and then by line."""
        encoder = task_tokenizer(self._task)
        label = f"read {self._split}" if self._files is None else None
        documents = corpora.split_documents(self._task, self._split, label, self._files)
        texts = (document.text for document in itertools.islice(documents, skip, None))

        def encode(batch: list[str]) -> TokenBatch:
            return join(encoder.encode_batch(batch))

        return parallel.in_order(encode, corpora.text_batches(texts), _TOKENIZING)

    def fingerprint(self) -> str:
        """Returns a digest of the task and of its files' names, sizes and times."""
        return _digest(
            self._task,
            self._split,
            source_fingerprint(self._task, self._split),
            vocabulary_fingerprint(self._task),
        )

    def shares(self) -> list[TokenSource]:
        """Returns sources of some files each; see `_SHARE_BYTES`."""
        if self._task.max_bytes is not None:
            raise UserError(
                "a text with max_bytes cannot be split, because the limit applies to "
                "all files together: leave max_bytes out."
            )
        groups: list[list[SourceFile]] = []
        room = 0
        for file in corpora.corpus_files(self._task):
            size = file.path.stat().st_size
            if not groups or size > room:
                groups.append([])
                room = _SHARE_BYTES
            groups[-1].append(file)
            room -= size
        shares: list[TokenSource] = []
        for group in groups:
            share = copy.copy(self)  # Does not load the vocabulary again.
            share._files = tuple(group)
            shares.append(share)
        return shares


class RegisteredTask(TokenSource):
    """A registered seqio task, read through seqio."""

    def __init__(self, name: str, split: str, vocabulary: str) -> None:
        encoder = tokenizer.named_tokenizer(vocabulary)
        super().__init__(name, encoder.vocab_size, encoder.end_of_text)
        self._split = split
        self._vocabulary = vocabulary

    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        """Yields the documents, in the order of the task without shuffling."""
        # Imports TensorFlow, which is not installed on hosts that only decode.
        from bpd_jax.data import seqio_tasks

        documents = itertools.islice(
            seqio_tasks.token_documents(self.name, self._split, self._vocabulary),
            skip,
            None,
        )
        while batch := list(itertools.islice(documents, _BATCH_DOCUMENTS)):
            yield join(batch)

    def fingerprint(self) -> str:
        """Returns a digest of the settings; seqio cannot detect changes of the text."""
        return _digest(self.name, self._split, self._vocabulary)


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
