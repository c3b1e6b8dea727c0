"""Where the token sequences of an n-gram model come from."""

import os
import pathlib
from collections.abc import Iterator

import numpy as np

from bpd_jax import progress
from bpd_jax.errors import UserError
from bpd_jax.ngrams.text_lines import numbered_lines

_HIGHEST_ID = np.iinfo(np.int32).max


def read_token_file(path: str | os.PathLike[str]) -> Iterator[np.ndarray]:
    """Yields one int32 sequence per line of a file of token ids, plain or gzip.

    The ids of a line are decimal numbers with blanks between them. Empty lines are
    passed over.

    Raises:
      UserError: the file cannot be read, or a line holds something else.
    """
    path = pathlib.Path(path)
    lines = numbered_lines(path)
    for number, line in progress.bar(lines, label="read", unit=" lines"):
        fields = line.split()
        if not fields:
            continue
        if not b"".join(fields).isdigit():
            wrong = next(field for field in fields if not field.isdigit())
            raise UserError(
                f"{path}, line {number}: {wrong.decode('utf-8', 'backslashreplace')!r} "
                "is no token id; ids are decimal numbers with blanks between them."
            )
        ids = [int(field) for field in fields]
        if max(ids) > _HIGHEST_ID:
            raise UserError(f"{path}, line {number}: {max(ids)} is no token id.")
        yield np.array(ids, np.int32)


def task_vocabulary(
    task_name: str, *, vocabulary: str, text_files: str | None
) -> tuple[int, int]:
    """Returns V and the end-of-text token of a task's vocabulary.

    Raises:
      UserError: there is no such vocabulary.
    """
    from bpd_jax.data import spec, tokenizer

    if task_name in spec.CORPORA:
        task = spec.TextTask(task_name, text_files, vocabulary)
        found = tokenizer.task_tokenizer(task)
    else:
        found = tokenizer.named_tokenizer(vocabulary)
    return found.vocab_size, found.end_of_text


def read_task(
    task_name: str,
    *,
    split: str,
    vocabulary: str,
    text_files: str | None,
    max_bytes: int | None = None,
) -> Iterator[np.ndarray]:
    """Yields the token ids of each document of a task; see `data.tasks`."""
    # TensorFlow comes with it, which hosts that only decode do not have.
    from bpd_jax.data import tasks

    yield from tasks.token_documents(
        task_name,
        split=split,
        vocabulary=vocabulary,
        text_files=text_files,
        max_bytes=max_bytes,
        label=f"read {split}",
    )
