"""Documents of a corpus, in a deterministic order, split by document.

Three properties of a document are hashes of its id, so that they depend neither on the
machine nor on other documents: its split, its rank when `max_bytes` selects documents,
and (in `run_loading`) its rank as a prompt. The id is the file's path relative to the
corpus folder, followed by `:line` for a line of JSON Lines.
"""

import contextlib
import hashlib
import heapq
import os
import pathlib
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.data import generations, text_readers
from bpd_jax.data.text_task import ALL, GENERATIONS, SPLITS, TextTask
from bpd_jax.storage import files
from bpd_jax.storage.paths import matching


class Document(NamedTuple):
    """One text; `id` is unique in its corpus."""

    id: str
    text: str


class SourceFile(NamedTuple):
    """One file of a corpus; `name` is its path relative to the corpus folder."""

    name: str
    path: pathlib.Path


class EmptySplitError(UserError):
    """A split has no documents; `reason` is the message without the advice."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}: {advice}")
        self.reason = reason


# Folders of the standard library with tests, installed packages or compiled files.
# Debian names its package folder dist-packages.
_SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "__pycache__", "dist-packages", "site-packages")
}
# Characters of a batch for the tokenizer.
_BATCH_CHARACTERS = 1 << 21


def corpus_files(task: TextTask) -> list[SourceFile]:
    """Returns the files of the task's corpus, sorted by name."""
    if task.corpus == "text_files":
        return matched_files(task.text_files or "", "text_files")
    if task.corpus == GENERATIONS:
        folder = pathlib.Path(task.text_files or "")
        generations.read_header(folder)
        paths = [folder / generations.HEADER, *generations.shard_paths(folder)]
        return [SourceFile(path.name, path) for path in paths]
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    sources = []
    for above, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        sources += [
            SourceFile(path.relative_to(root).as_posix(), path)
            for path in (pathlib.Path(above, name) for name in names)
            # _sysconfigdata records how this interpreter was built: it is generated.
            if path.suffix == ".py"
            and not path.name.startswith("_sysconfigdata")
            and path.is_file()
        ]
    if not sources:
        raise UserError(
            f"{root} has no Python sources: this Python was installed without them; "
            "use the corpus text_files."
        )
    return sorted(sources)


def matched_files(pattern: str, parameter: str) -> list[SourceFile]:
    """Returns the files that match a pattern (`paths.matching`), sorted by name.

    Names are relative to the folder above the first wildcard: `old/b.txt` for
    `books/**/*.txt`.
    """
    root, paths = matching(pattern, parameter)
    return sorted(SourceFile(x.relative_to(root).as_posix(), x) for x in paths)


def all_documents(
    task: TextTask, among: Iterable[SourceFile] | None = None
) -> Iterator[Document]:
    """Yields every document that is not empty, by file name, then by line.

    `among` are some of the files; by default all.
    """
    if task.corpus == GENERATIONS:
        raise UserError(
            f"{task.text_files} holds token ids and no text: give prompts or a text of "
            "your own."
        )
    for name, path in corpus_files(task) if among is None else among:
        documents: Iterable[Document] = ()
        if task.corpus == "stdlib":
            # A file that is not UTF-8, or far larger than a source file, is skipped.
            with contextlib.suppress(ValueError):
                documents = [Document(name, files.read_bytes(path).decode("utf-8"))]
        elif text_readers.is_json_lines(path):
            lines = text_readers.read_json_fields(path, ["text"])
            documents = (Document(f"{name}:{n}", each["text"][0]) for n, each in lines)
        else:
            documents = [Document(name, text_readers.read_text(path))]
        yield from (document for document in documents if document.text)


def text_batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Groups texts into batches, which a tokenizer encodes on all cores."""
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


def fraction_of(purpose: str, document_id: str) -> float:
    """Returns a stable hash in [0, 1) of an id, independent for each purpose."""
    digest = hashlib.blake2b(
        document_id.encode("utf-8", "surrogateescape"),
        digest_size=6,
        person=purpose.encode(),
    ).digest()
    return int.from_bytes(digest) / 2**48


def split_of(key: str, validation_fraction: float) -> str:
    """The split of a document or example: `train` or `validation`, by a hash.

    The key is its id, or what it shares with those that must be in the same split.
    """
    return SPLITS[fraction_of("split", key) < validation_fraction]


def sample_ids(documents: Iterable[Document], max_bytes: int) -> tuple[set[str], int]:
    """Selects documents in hash order until `max_bytes` of UTF-8 text are reached.

    A larger limit selects a superset of the documents of a smaller one. Returns their
    ids, and the total size of their texts in bytes.
    """
    # The top of the heap is the last document in hash order. When the total exceeds the
    # limit, this document and all documents after it in hash order are excluded.
    selected: list[tuple[float, str, int]] = []
    total = 0
    upper = 1.0
    for document in documents:
        fraction = fraction_of("order", document.id)
        if fraction >= upper:
            continue
        size = len(document.text.encode("utf-8"))
        heapq.heappush(selected, (-fraction, document.id, size))
        total += size
        while total > max_bytes:
            negated, _, size = heapq.heappop(selected)
            total -= size
            upper = -negated
    return {document_id for _, document_id, _ in selected}, total


def split_documents(
    task: TextTask,
    split: str,
    label: str | None = None,
    among: Collection[SourceFile] | None = None,
) -> Iterator[Document]:
    """Yields the documents of one split or of `all`, in the order of `all_documents`.

    `among` are some of the corpus files. With a label there is a progress bar.
    """
    task.check_split(split)
    selected, total = None, None
    if task.max_bytes is not None:
        selected, total = sample_ids(all_documents(task), task.max_bytes)
    elif label and not any(file.path.suffix == ".gz" for file in corpus_files(task)):
        total = sum(file.path.stat().st_size for file in corpus_files(task))
    counts = dict.fromkeys(SPLITS, 0)
    with progress.bar(
        label=label or "", total=total, unit="B", unit_scale=True, disable=label is None
    ) as bar:
        for document in all_documents(task, among):
            if selected is not None and document.id not in selected:
                continue
            document_split = split_of(document.id, task.validation_fraction)
            counts[document_split] += 1
            if split in (ALL, document_split):
                yield document
            bar.update(len(document.text.encode("utf-8")))
    empty = [name for name in SPLITS if not counts[name]]
    if among is not None or not empty:
        return
    corpus = task.text_files or task.corpus
    limit = "" if task.max_bytes is None else f" within max_bytes={task.max_bytes}"
    if len(empty) == len(SPLITS):
        raise UserError(f"{corpus} holds no text{limit}.")
    if split != ALL:
        raise EmptySplitError(
            f"none of the {sum(counts.values())} documents of {corpus}{limit} falls "
            f"into the {empty[0]} split at validation_fraction="
            f"{task.validation_fraction}",
            "give more documents, for example as .jsonl with one document per line, or "
            "another validation_fraction.",
        )
