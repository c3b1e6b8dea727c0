"""From a corpus to a folder of packed rows, once; later runs find it ready."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from bpd_jax import files, progress
from bpd_jax.data import corpora, tokenizer
from bpd_jax.data.generated import cut_texts, end_token, split_texts
from bpd_jax.data.generations import open_generations
from bpd_jax.data.packing import pack
from bpd_jax.data.rows import FORMAT, LOSS_MASK, PackedRows, open_rows
from bpd_jax.data.spec import GENERATIONS, TextTask, check_split
from bpd_jax.errors import UserError

# Segment ids are stored as uint16, and a row may hold as many segments as tokens.
_LONGEST_ROW = 65535


def prepare_rows(
    task: TextTask, split: str, length: int, folder: str | os.PathLike[str]
) -> PackedRows:
    """Tokenizes and packs one split into `folder`, or finds it there.

    A folder made from the same task, text, vocabulary, split and length is used as
    it is; any other folder of rows is replaced. A host without seqio cannot make rows
    of text and may lack the text, so there the text is not compared.

    Args:
      task: corpus and vocabulary.
      split: `train` or `validation`.
      length: tokens of a row, T.
      folder: where the rows lie afterwards.

    Raises:
      UserError: the corpus or vocabulary is at fault, `folder` is something else, or
        rows must be made on a host without seqio.
    """
    check_split(split)
    if not 2 <= length <= _LONGEST_ROW:
        raise UserError(f"length is {length}: a row holds 2 to {_LONGEST_ROW} tokens.")
    folder = pathlib.Path(folder)
    can_make = (
        task.corpus == GENERATIONS or importlib.util.find_spec("seqio") is not None
    )
    fingerprint = {
        "corpus": task.corpus,
        "validation_fraction": task.validation_fraction,
        "max_bytes": task.max_bytes,
        "vocabulary": tokenizer.vocabulary_key(task),
        "split": split,
        "length": length,
    }
    if can_make:
        fingerprint["source"] = corpora.source_digest(task)
    found = _find_rows(folder)
    if found is not None and fingerprint.items() <= found.items():
        return open_rows(folder)
    if not can_make:
        raise UserError(
            f"{folder} does not hold the {split} rows of {task.name} at length "
            f"{length}, and this host cannot make them: seqio is not installed. Make "
            "them where it is, and copy the folder."
        )
    _make_rows(task, split, length, folder, fingerprint)
    return open_rows(folder)


def _find_rows(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the fingerprint of the rows in `folder`, {} for rows that are broken."""
    if not folder.exists():
        return None
    if not (folder / "rows.json").exists() and (
        not folder.is_dir() or any(folder.iterdir())
    ):
        raise UserError(
            f"{folder} exists and holds no token files: name another folder, or "
            "remove it."
        )
    try:
        return open_rows(folder).fingerprint
    except UserError:
        return {}


def _make_rows(
    task: TextTask,
    split: str,
    length: int,
    folder: pathlib.Path,
    fingerprint: dict[str, Any],
) -> None:
    vocabulary = tokenizer.task_tokenizer(task)
    pack_rows = _generated_rows if task.corpus == GENERATIONS else _text_rows
    source = pack_rows(task, split, length, vocabulary)
    dtype = "<u2" if source.vocab_size <= 2**16 else "<i4"
    num_tokens = 0
    with files.replacing_folder(folder) as temporary:
        with contextlib.ExitStack() as stack:

            def write(name: str, dtype: str) -> _NpyWriter:
                return stack.enter_context(_NpyWriter(temporary / name, dtype, length))

            tokens = write("tokens.npy", dtype)
            segment_ids = write("segment_ids.npy", "<u2")
            mask = write(LOSS_MASK, "|b1") if source.has_context else None
            for row in source.rows:
                tokens.append(row.tokens)
                segment_ids.append(row.segment_ids)
                if mask is not None:
                    mask.append(row.loss_mask)
                num_tokens += int(np.count_nonzero(row.segment_ids))
        about = {
            "format": FORMAT,
            "rows": tokens.rows,
            "length": length,
            "tokens": num_tokens,
            "loss_mask": source.has_context,
            "documents": source.documents(),
            "split": split,
            "vocabulary": task.vocabulary,
            "vocab_size": source.vocab_size,
            "end_of_text": source.end_of_text,
            "task": dataclasses.asdict(task),
            "fingerprint": fingerprint,
        }
        text = json.dumps(about, indent=2) + "\n"
        (temporary / "rows.json").write_text(text, encoding="utf-8")
        vocabulary.save(temporary / tokenizer.FILE_NAME)


class _Row(NamedTuple):
    """One row, `[T]` each; see `rows.Batch`."""

    tokens: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray


class _Source(NamedTuple):
    """Where rows come from.

    Attributes:
      rows: to be read once.
      documents: how many documents have been read.
      vocab_size: V.
      end_of_text: the token that ends a document.
      has_context: whether there are tokens without a loss.
    """

    rows: Iterator[_Row]
    documents: Callable[[], int]
    vocab_size: int
    end_of_text: int
    has_context: bool


def _text_rows(
    task: TextTask, split: str, length: int, vocabulary: tokenizer.Tokenizer
) -> _Source:
    # seqio and TensorFlow take seconds to import, and rows that are ready need none.
    from bpd_jax.data import converter, tasks

    seqio_task = tasks.get_task(task, label=f"rows {split}")
    lengths = {"targets": length}
    dataset = converter.PackingConverter()(
        seqio_task.get_dataset(lengths, split=split, shuffle=False), lengths
    )
    return _Source(
        rows=(
            _Row(row["tokens"], row["segment_ids"], row["loss_mask"])
            for row in tasks.examples(dataset, seqio_task.source)
        ),
        documents=lambda: seqio_task.source.documents,
        vocab_size=vocabulary.vocab_size,
        end_of_text=vocabulary.end_of_text,
        has_context=False,
    )


def _generated_rows(
    task: TextTask, split: str, length: int, vocabulary: tokenizer.Tokenizer
) -> _Source:
    texts = open_generations(task.text_files or "")
    if vocabulary.vocab_size > texts.vocab_size:
        raise UserError(
            f"the vocabulary {task.vocabulary} has {vocabulary.vocab_size} tokens and "
            f"the model that wrote {texts.folder} {texts.vocab_size}: give the "
            "tokenizer.json of that model."
        )
    chosen = split_texts(texts, split, task.validation_fraction)
    bar = progress.bar(chosen, label=f"rows {split}", unit=" texts")
    end = end_token(texts)
    return _Source(
        rows=(
            _Row(row[:, 0], segment_ids, row[:, 1])
            for row, segment_ids in pack(cut_texts(texts, bar, length), length)
        ),
        documents=lambda: len(chosen),
        # The model may have more tokens than its tokenizer uses.
        vocab_size=texts.vocab_size,
        end_of_text=vocabulary.end_of_text if end is None else end,
        has_context=True,
    )


class _NpyWriter:
    """Writes a two-dimensional .npy file row by row, of a length not yet known."""

    def __init__(self, path: pathlib.Path, dtype: str, length: int) -> None:
        self.rows = 0
        self._length = length
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")

    def __enter__(self) -> "_NpyWriter":
        self._write_header()
        return self

    def append(self, row: np.ndarray) -> None:
        self._file.write(row.astype(self._dtype).tobytes())
        self.rows += 1

    def __exit__(self, *error: object) -> None:
        # numpy leaves blanks after the header, in which the true shape finds room.
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": self._dtype.str,
                "fortran_order": False,
                "shape": (self.rows, self._length),
            },
        )
