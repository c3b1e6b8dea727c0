"""Where the token sequences of an n-gram model come from.

A source is read in batches of whole sequences, in an order that is always the same,
so that an interrupted reading can go on after any sequence.
"""

import abc
import copy
import glob
import hashlib
import inspect
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bpd_jax.errors import UserError
from bpd_jax.ngrams import parallel, trie
from bpd_jax.ngrams.counting import token_files
from bpd_jax.ngrams.counting.windows import TokenBatch, join

if TYPE_CHECKING:
    from bpd_jax.data.corpora import SourceFile
    from bpd_jax.data.spec import TextTask
    from bpd_jax.ngrams.settings import CountSettings

# Characters that are tokenized at once, and threads that ask for it: while one batch
# is tokenized, another becomes arrays and a third is read.
_BATCH_CHARACTERS = 1 << 21
_TOKENIZING = 2
# Documents of a registered task that make a batch.
_BATCH_DOCUMENTS = 256
# Bytes of text files that make one share of a source.
_SHARE_BYTES = 1 << 26


__all__ = [
    "GeneratedTexts",
    "RegisteredTask",
    "Source",
    "TextSource",
    "TokenBatch",
    "TokenFiles",
    "open_source",
    "source_of",
]


class Source(abc.ABC):
    """Token sequences.

    Attributes:
      name: what error messages call it.
      vocab_size: V.
      end_of_text: the token that stands for the ends of a sequence, or None.
    """

    def __init__(self, name: str, vocab_size: int, end_of_text: int | None) -> None:
        """Takes the attributes.

        Raises:
          UserError: V is too large.
        """
        trie.check_vocab_size(vocab_size, name)
        self.name = name
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text

    @abc.abstractmethod
    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        """Yields the sequences after the first `skip`.

        Raises:
          UserError: the input is at fault.
        """

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Returns a digest of what tells the sequences from others; reads no text."""

    def shares(self) -> "list[Source]":
        """Returns sources that have the sequences of this one between them.

        They can be pickled, and read on different machines.

        Raises:
          UserError: the source cannot be shared out.
        """
        raise UserError(
            f"{self.name} is read from beginning to end and cannot be shared out: "
            "give text or tokens."
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
    split: str | None = None,
    vocabulary: str = "gpt3",
    max_bytes: int | None = None,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
) -> Source:
    """Opens a source; exactly one of task, text, tokens and generations is given.

    Args:
      task: name of a text task, or of a registered seqio task.
      text: glob of text files.
      tokens: glob of files of token ids, in which `**` crosses folders; see
        `bpd_jax.ngrams.counting.token_files`.
      generations: folder of texts that a model wrote, as `bpd_jax.distill` leaves it.
      split: of task, text and generations; None for `all` of a text, else `train`.
      vocabulary: of task and text.
      max_bytes: of task and text: bytes of text to take, both splits together.
      vocab_size: of tokens; None for the highest id plus 1.
      end_of_text: of tokens: the token that stands for the ends of a sequence.

    Raises:
      UserError: nothing is there, or the arguments do not fit.
    """
    if sum(1 for value in (task, text, tokens, generations) if value) != 1:
        raise UserError("give exactly one of task, text, tokens and generations.")
    if tokens:
        return TokenFiles.open(tokens, vocab_size, end_of_text)
    if generations:
        return GeneratedTexts(generations, split or "train")
    split = split or ("all" if text else "train")
    return _task_source(task or "text_files", split, vocabulary, text, max_bytes)


def source_of(settings: "CountSettings") -> Source:
    """Opens the source that settings name; see `open_source`."""
    names = inspect.signature(open_source).parameters
    return open_source(**{name: getattr(settings, name) for name in names})


def _task_source(
    name: str, split: str, vocabulary: str, text: str | None, max_bytes: int | None
) -> Source:
    from bpd_jax.data import spec

    if name in spec.CORPORA:
        task = spec.TextTask(name, text, vocabulary, max_bytes=max_bytes)
        return TextSource(task, split)
    if text is not None or max_bytes is not None:
        raise UserError(
            f"text and max_bytes go with the tasks {' and '.join(spec.CORPORA)}, not "
            f"with {name!r}."
        )
    return RegisteredTask(name, split, vocabulary)


class TokenFiles(Source):
    """Files of token ids, one after the other."""

    def __init__(
        self,
        name: str,
        paths: Sequence[pathlib.Path],
        vocab_size: int,
        end_of_text: int | None,
        label: str | None = "read",
    ) -> None:
        """Takes the files, what a `Source` has, and the name of a progress bar."""
        super().__init__(name, vocab_size, end_of_text)
        self._paths = paths
        self._label = label

    @classmethod
    def open(
        cls, pattern: str, vocab_size: int | None, end_of_text: int | None
    ) -> "TokenFiles":
        """Finds the files, and the highest id if V is not given.

        Raises:
          UserError: a file is missing or at fault.
        """
        pattern = os.path.expanduser(pattern)
        if vocab_size is not None and vocab_size < 1:
            raise UserError(f"vocab_size is {vocab_size}: it must be 1 or more.")
        found = sorted(set(glob.glob(pattern, recursive=True)))
        paths = [pathlib.Path(path) for path in found if not os.path.isdir(path)]
        if not paths:
            if glob.has_magic(pattern):
                raise UserError(f"tokens={pattern!r} matches no file: check the path.")
            paths = [pathlib.Path(pattern)]  # Reading it says what is wrong.
        if vocab_size is None:
            highest = [token_files.highest_id(path) for path in paths]
            vocab_size = 1 + max(*highest, -1 if end_of_text is None else end_of_text)
        return cls(pattern, paths, vocab_size, end_of_text)

    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        """Yields the sequences of the files, in the order of their names."""
        return _without_first(
            skip,
            itertools.chain.from_iterable(
                token_files.read_batches(path, self.end_of_text) for path in self._paths
            ),
        )

    def fingerprint(self) -> str:
        """Returns a digest of the settings and of names, sizes and times of files."""
        files = []
        for path in self._paths:
            status = path.stat()
            files.append((path.name, status.st_size, status.st_mtime_ns))
        return _digest(self.vocab_size, self.end_of_text, files)

    def shares(self) -> list[Source]:
        """Returns a source per file."""
        return [
            TokenFiles(str(path), [path], self.vocab_size, self.end_of_text, None)
            for path in self._paths
        ]


class GeneratedTexts(Source):
    """Texts that a model wrote: the tokens of each, prompt included, are a sequence."""

    def __init__(self, folder: str, split: str) -> None:
        """Takes the folder and one of its splits, as `TextTask` has them.

        Raises:
          UserError: there is no such split, or the folder is missing or damaged.
        """
        from bpd_jax.data import generated, generations, spec

        self._texts = generations.open_generations(folder)
        self._task = spec.TextTask(spec.GENERATIONS, folder, vocabulary=folder)
        self._split = split
        self._rows = generated.split_texts(
            self._texts, split, self._task.validation_fraction
        )
        end = generated.end_token(self._texts)
        super().__init__(folder, self._texts.vocab_size, end)

    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        """Yields the texts, in the order of the folder."""
        rows = iter(self._rows[skip:])
        while batch := list(itertools.islice(rows, _BATCH_DOCUMENTS)):
            yield join([self._texts[row] for row in batch])

    def fingerprint(self) -> str:
        """Returns a digest of the split and of names, sizes and times of the files."""
        from bpd_jax.data import corpora

        return _digest(self._task, self._split, corpora.source_digest(self._task))


class TextSource(Source):
    """Documents of a corpus, read and tokenized on all cores."""

    def __init__(self, task: "TextTask", split: str) -> None:
        """Takes the corpus and one of its splits.

        Raises:
          UserError: there is no such split, corpus or vocabulary.
        """
        from bpd_jax.data import spec, tokenizer

        spec.check_split(split)
        found = tokenizer.task_tokenizer(task)
        name = task.text_files or task.corpus
        super().__init__(name, found.vocab_size, found.end_of_text)
        self._task = task
        self._split = split
        self._among: tuple[SourceFile, ...] | None = None  # all files

    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        """Yields the documents, by file name and then by line."""
        from bpd_jax.data import corpora, tokenizer

        encoder = tokenizer.task_tokenizer(self._task)
        label = f"read {self._split}" if self._among is None else None
        documents = corpora.split_documents(self._task, self._split, label, self._among)
        texts = (document.text for document in itertools.islice(documents, skip, None))

        def encode(batch: list[str]) -> TokenBatch:
            return join(encoder.encode_batch(batch))

        return parallel.in_order(encode, _text_batches(texts), _TOKENIZING)

    def fingerprint(self) -> str:
        """Returns a digest of the task and of names, sizes and times of its files."""
        from bpd_jax.data import corpora, tokenizer

        return _digest(
            self._task,
            self._split,
            corpora.source_digest(self._task),
            tokenizer.vocabulary_key(self._task),
        )

    def shares(self) -> list[Source]:
        """Returns sources of some files each; see `_SHARE_BYTES`."""
        from bpd_jax.data import corpora

        if self._task.max_bytes is not None:
            raise UserError("max_bytes is chosen over all files: leave it out here.")
        groups: list[list[SourceFile]] = []
        room = 0
        for file in corpora.corpus_files(self._task):
            size = file.path.stat().st_size
            if not groups or size > room:
                groups.append([])
                room = _SHARE_BYTES
            groups[-1].append(file)
            room -= size
        shares: list[Source] = []
        for group in groups:
            share = copy.copy(self)  # Without loading the vocabulary again.
            share._among = tuple(group)
            shares.append(share)
        return shares


class RegisteredTask(Source):
    """A registered seqio task, read through seqio."""

    def __init__(self, name: str, split: str, vocabulary: str) -> None:
        from bpd_jax.data import tokenizer

        found = tokenizer.named_tokenizer(vocabulary)
        super().__init__(name, found.vocab_size, found.end_of_text)
        self._split = split
        self._vocabulary = vocabulary

    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        """Yields the documents, in the order of the task without shuffling."""
        # TensorFlow comes with it, which hosts that only decode do not have.
        from bpd_jax.data import tasks

        documents = itertools.islice(
            tasks.token_documents(
                self.name,
                split=self._split,
                vocabulary=self._vocabulary,
                label=f"read {self._split}",
            ),
            skip,
            None,
        )
        while batch := list(itertools.islice(documents, _BATCH_DOCUMENTS)):
            yield join(batch)

    def fingerprint(self) -> str:
        """Returns a digest of the settings: seqio does not tell a changed text."""
        return _digest(self.name, self._split, self._vocabulary)


def _text_batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    room = _BATCH_CHARACTERS
    for text in texts:
        batch.append(text)
        room -= len(text)
        if room <= 0:
            yield batch
            batch, room = [], _BATCH_CHARACTERS
    if batch:
        yield batch


def _without_first(skip: int, batches: Iterable[TokenBatch]) -> Iterator[TokenBatch]:
    """Leaves out the first `skip` sequences."""
    for tokens, lengths in batches:
        if skip < lengths.size:
            yield TokenBatch(tokens[int(lengths[:skip].sum()) :], lengths[skip:])
        skip = max(skip - lengths.size, 0)


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
