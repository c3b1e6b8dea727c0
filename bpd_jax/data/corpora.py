"""Documents of a corpus, in one deterministic order, split by document.

Three choices are made from hashes of a document's id, so that they depend neither
on the machine nor on the other documents: the split it falls in, its place in the
order in which `max_bytes` takes documents, and (in `prompts`) its turn to be a
prompt. An id is the file's path below the corpus folder, with `:line` for a line of
JSON Lines.
"""

import dataclasses
import glob
import hashlib
import heapq
import math
import os
import pathlib
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from bpd_jax import progress
from bpd_jax.data import generations, text_readers
from bpd_jax.data.text_task import ALL, GENERATIONS, SPLITS, TextTask, check_split
from bpd_jax.errors import UserError


class Document(NamedTuple):
    """One text; `id` is unique in its corpus."""

    id: str
    text: str


class SourceFile(NamedTuple):
    """One file of a corpus; `name` is its path below the corpus folder."""

    name: str
    path: pathlib.Path


class EmptySplitError(UserError):
    """A split has no documents; `reason` is the message without the advice."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}: {advice}")
        self.reason = reason


# Folders of the standard library that hold tests, other people's packages or
# compiled files. Debian names its package folder dist-packages.
_SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}


def corpus_files(task: TextTask) -> list[SourceFile]:
    """Returns the files of the task's corpus, sorted by name.

    Raises:
      UserError: there is none.
    """
    return _FINDERS[task.corpus](task)


def _stdlib_files(task: TextTask) -> list[SourceFile]:
    del task
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        files += [
            SourceFile(path.relative_to(root).as_posix(), path)
            for path in (pathlib.Path(folder, name) for name in names)
            # _sysconfigdata records how this interpreter was built: it is generated.
            if path.suffix == ".py"
            and not path.name.startswith("_sysconfigdata")
            and path.is_file()
        ]
    if not files:
        raise UserError(
            f"there are no Python sources below {root}: this Python lacks "
            "them; use the corpus text_files."
        )
    return sorted(files)


def _text_files(task: TextTask) -> list[SourceFile]:
    return matched_files(task.text_files or "", "text_files")


def matched_files(pattern: str, parameter: str) -> list[SourceFile]:
    """Returns the files that a glob finds, sorted by name.

    Args:
      pattern: a glob; `**` matches folders at any depth, `~` is the home folder.
      parameter: its name in error messages.

    Raises:
      UserError: there is none.
    """
    original, pattern = pattern, os.path.expanduser(pattern)
    root = pathlib.Path(_fixed_folder(pattern))
    paths = [pathlib.Path(name) for name in glob.glob(pattern, recursive=True)]
    files = [
        SourceFile(path.relative_to(root).as_posix(), path)
        for path in paths
        if path.is_file()
    ]
    if not files:
        raise UserError(
            f"{parameter}={original!r} matches no file: check the path; '**' crosses "
            "folders."
        )
    return sorted(files)


def _fixed_folder(pattern: str) -> str:
    """The folder above the first wildcard of a glob.

    >>> _fixed_folder("books/old/**/*.txt"), _fixed_folder("a.txt")
    ('books/old', '')
    """
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    return folder


def _generated_files(task: TextTask) -> list[SourceFile]:
    folder = pathlib.Path(task.text_files or "")
    generations.read_header(folder)
    paths = [folder / generations.HEADER, *generations.shard_paths(folder)]
    return [SourceFile(path.name, path) for path in paths]


_FINDERS: dict[str, Callable[[TextTask], list[SourceFile]]] = {
    "stdlib": _stdlib_files,
    "text_files": _text_files,
    GENERATIONS: _generated_files,
}


def source_digest(task: TextTask) -> str:
    """Returns a digest of names, sizes and times of the corpus files.

    It changes when a file is added, removed or written; the text is not read.
    """
    return files_digest(corpus_files(task))


def files_digest(source_files: Iterable[SourceFile]) -> str:
    """Returns a digest of names, sizes and times of files."""
    digest = hashlib.blake2b(digest_size=16)
    for name, path in source_files:
        status = path.stat()
        line = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def all_documents(
    task: TextTask, among: Iterable[SourceFile] | None = None
) -> Iterator[Document]:
    """Yields every document that is not empty, by file name, then by line.

    Args:
      task: the corpus.
      among: some of its files; by default all.

    Raises:
      UserError: a file cannot be read, is not UTF-8 or is not valid JSON Lines; or
        the corpus holds no text.
        (Files of the standard library that are not UTF-8 are skipped.)
    """
    if task.corpus == GENERATIONS:
        raise UserError(
            f"{task.text_files} holds token ids and no text: give prompts, or a text, "
            "of your own."
        )
    for name, path in corpus_files(task) if among is None else among:
        for document in _documents_of_file(name, path, task.corpus == "stdlib"):
            if document.text:
                yield document


def _documents_of_file(
    name: str, path: pathlib.Path, pass_over: bool
) -> Iterator[Document]:
    if pass_over:
        try:
            yield Document(name, path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            return
    elif text_readers.is_json_lines(path):
        for number, text in text_readers.read_json_field(path, "text"):
            yield Document(f"{name}:{number}", text)
    else:
        yield Document(name, text_readers.read_text(path))


def fraction_of(purpose: str, document_id: str) -> float:
    """Returns a stable hash in [0, 1) of an id, independent for each purpose."""
    digest = hashlib.blake2b(
        document_id.encode("utf-8", "surrogateescape"),
        digest_size=6,
        person=purpose.encode(),
    ).digest()
    return int.from_bytes(digest) / 2**48


def sample_ids(documents: Iterable[Document], max_bytes: int) -> tuple[set[str], int]:
    """Selects documents in hash order until `max_bytes` of UTF-8 text are reached.

    A larger limit selects a superset of the documents of a smaller one.

    Returns:
      The ids, and the total size of their texts in bytes.
    """
    # A heap with the last document in hash order on top: when the total passes
    # the limit, that document and all after it in hash order are out.
    chosen: list[tuple[float, str, int]] = []
    total = 0
    cut = 1.0
    for document in documents:
        fraction = fraction_of("order", document.id)
        if fraction >= cut:
            continue
        size = len(document.text.encode("utf-8"))
        heapq.heappush(chosen, (-fraction, document.id, size))
        total += size
        while total > max_bytes:
            last, _, size = heapq.heappop(chosen)
            total -= size
            cut = -last
    return {document_id for _, document_id, _ in chosen}, total


def split_documents(
    task: TextTask,
    split: str,
    label: str | None = None,
    among: Collection[SourceFile] | None = None,
) -> Iterator[Document]:
    """Yields the documents of one split, in the order of `all_documents`.

    Args:
      task: the corpus, its limit and its split.
      split: `train`, `validation`, or `all` for both together.
      label: name of a progress bar over the text read, or None for no bar.
      among: some of the corpus files; by default all.

    Raises:
      UserError: as `all_documents`; or, after the last document of all files, one of
        the two splits is empty (not for `all`).
    """
    check_split(split)
    chosen, total = None, None
    if task.max_bytes is not None:
        chosen, total = sample_ids(all_documents(task), task.max_bytes)
    elif label and not any(file.path.suffix == ".gz" for file in corpus_files(task)):
        total = sum(file.path.stat().st_size for file in corpus_files(task))
    places = _Places()
    with progress.bar(
        label=label or "", total=total, unit="B", unit_scale=True, disable=label is None
    ) as bar:
        for document in all_documents(task, among):
            if chosen is not None and document.id not in chosen:
                continue
            fraction = fraction_of("split", document.id)
            places.add(fraction)
            if split in (ALL, SPLITS[fraction < task.validation_fraction]):
                yield document
            bar.update(len(document.text.encode("utf-8")))
    if among is None:
        _check_places(task, places, split)


@dataclasses.dataclass
class _Places:
    """The number of documents, and the first and the last of their places in [0, 1)."""

    count: int = 0
    first: float = 1.0
    last: float = 0.0

    def add(self, place: float) -> None:
        self.count += 1
        self.first, self.last = min(self.first, place), max(self.last, place)


def _check_places(task: TextTask, places: _Places, split: str) -> None:
    """Raises a `UserError` unless both splits hold a document, if there are two."""
    corpus = task.text_files or task.corpus
    limit = "" if task.max_bytes is None else f" within max_bytes={task.max_bytes}"
    if not places.count:
        raise UserError(f"{corpus} holds no text{limit}.")
    if split == ALL:
        return
    if places.count == 1:
        raise UserError(
            f"{corpus} holds one document{limit}, which cannot be split into train "
            "and validation: give more documents, for example as .jsonl with one a "
            "line."
        )
    first, last = places.first, places.last
    if first >= task.validation_fraction or last < task.validation_fraction:
        empty = "validation" if first >= task.validation_fraction else "train"
        # Any fraction above the first place and not above the last leaves neither
        # split empty; two digits suffice unless the places nearly coincide.
        advice = min(math.ceil((first + 1e-6) * 100) / 100, last)
        raise EmptySplitError(
            f"none of the {places.count} documents of {corpus}{limit} falls into the "
            f"{empty} split at validation_fraction={task.validation_fraction}",
            f"give more documents or set validation_fraction to {advice}.",
        )
