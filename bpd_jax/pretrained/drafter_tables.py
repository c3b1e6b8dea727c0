"""The tables of published drafters: draft vocabulary, embedding and softmax."""

import pathlib

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array
from bpd_jax.models.attachments import check_vocabulary
from bpd_jax.models.partitioning import on_host
from bpd_jax.pretrained.drafter_layout import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    SOFTMAX,
    TARGET_IN_DRAFT,
    UNUSED,
)
from bpd_jax.pretrained.safetensors_files import CONFIG, SafetensorsFiles

# Rows of an embedding or softmax compared at once.
_ROWS = 4096
# Quantisation of the target changes its embeddings by a few percent.
_SAME_EMBEDDING = 0.1


def check_names(folder: pathlib.Path, names: set[str], expected: set[str]) -> None:
    """Raises a `UserError` for unknown tensors."""
    shared_names = {EMBEDDING, SOFTMAX, DRAFT_TO_TARGET, TARGET_IN_DRAFT, *UNUSED}
    unknown = sorted(names - expected - shared_names)
    if unknown:
        raise UserError(
            f"{folder} has {len(unknown)} unknown tensors, such as "
            f"{unknown[0]}: use another drafter."
        )
    pickled = next(folder.glob("mask_embedding.*"), None)
    if pickled is not None:
        raise UserError(
            f"{folder} has its mask embedding as the pickled file {pickled.name}, "
            "which can run code and is not read: use another drafter."
        )


def draft_vocabulary(
    folder: pathlib.Path,
    tensors: SafetensorsFiles,
    size: int,
    vocab_size: int,
) -> np.ndarray:
    """The ids of a draft vocabulary, `[size]` int32."""
    distances = tensors.read_integers(DRAFT_TO_TARGET)
    if distances.shape != (size,):
        raise UserError(
            f"{DRAFT_TO_TARGET} of {folder} has shape {list(distances.shape)}, but "
            f"{CONFIG} declares {size} tokens: the folder is "
            "damaged."
        )
    ids = np.arange(len(distances)) + distances.astype(np.int64)
    # Numbers beyond the vocabulary stay beyond it as int32.
    ids = np.clip(ids, -1, vocab_size).astype(np.int32)
    try:
        check_vocabulary(ids, vocab_size)
    except ValueError as error:
        raise UserError(
            f"{DRAFT_TO_TARGET} of {folder}: {error}; get the folder again."
        ) from error
    _check_mask(folder, tensors, ids, distances, vocab_size)
    return ids


def _check_mask(
    folder: pathlib.Path,
    tensors: SafetensorsFiles,
    ids: np.ndarray,
    distances: np.ndarray,
    vocab_size: int,
) -> None:
    """Compares the draft vocabulary with its mask over all tokens, if there is one."""
    absolute = (
        f"{DRAFT_TO_TARGET} of {folder} seems to hold ids of tokens, not their "
        "distances from the ids of the draft vocabulary: subtract 0, 1, 2, …."
    )
    if TARGET_IN_DRAFT not in tensors.names:
        if len(ids) > 2 and (np.diff(distances.astype(np.int64)) > 0).all():
            raise UserError(absolute)
        return
    mask = tensors.read_integers(TARGET_IN_DRAFT).astype(bool)
    if mask.shape != (vocab_size,):
        raise UserError(
            f"{TARGET_IN_DRAFT} of {folder} has shape {list(mask.shape)}, but the "
            f"model has {vocab_size} tokens: the drafter belongs to another model."
        )
    if not np.array_equal(np.flatnonzero(mask), np.sort(ids)):
        if np.array_equal(np.flatnonzero(mask), np.sort(distances)):
            raise UserError(absolute)
        raise UserError(
            f"{DRAFT_TO_TARGET} and {TARGET_IN_DRAFT} of {folder} name different "
            "tokens: the folder is damaged; get it again."
        )


def _table(
    folder: pathlib.Path, tensors: SafetensorsFiles, name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """A matrix of the drafter that has a counterpart of this shape in the target."""
    table = tensors.read(name)
    if table.shape != shape:
        raise UserError(
            f"{name} of {folder} has shape {list(table.shape)} and not "
            f"{list(shape)}: the drafter belongs to another model."
        )
    return table


def target_embedding(
    folder: pathlib.Path,
    tensors: SafetensorsFiles,
    embedding: Array,
    besides: int | None = None,
) -> np.ndarray | None:
    """The drafter's embedding; None if it has none.

    Raises:
      UserError: rows other than row `besides` are not the target's.
    """
    if EMBEDDING not in tensors.names:
        return None
    embeddings = _table(folder, tensors, EMBEDDING, embedding.shape)
    difference = size = 0.0
    for begin in range(0, len(embeddings), _ROWS):
        rows = slice(begin, begin + _ROWS)
        expected = np.array(on_host(embedding[rows]), np.float32)
        actual = np.array(embeddings[rows], np.float32)
        if besides is not None and begin <= besides < begin + len(actual):
            actual[besides - begin] = expected[besides - begin]
        difference += float(np.square(actual - expected).sum())
        size += float(np.square(expected).sum())
    if not difference <= _SAME_EMBEDDING**2 * size:
        raise UserError(
            f"the embeddings of the drafter in {folder} differ from those of the "
            "model: it belongs to another model."
        )
    return embeddings


def own_softmax(
    folder: pathlib.Path, tensors: SafetensorsFiles, softmax: Array
) -> np.ndarray | None:
    """The drafter's softmax; None if it has none of its own; see `unless_equal`."""
    if SOFTMAX not in tensors.names:
        return None
    return unless_equal(_table(folder, tensors, SOFTMAX, softmax.shape), softmax)


def unless_equal(table: np.ndarray, target: Array) -> np.ndarray | None:
    """A drafter's table; None if it equals the target's in the narrower precision."""
    for begin in range(0, len(table), _ROWS):
        rows = slice(begin, begin + _ROWS)
        expected = np.asarray(on_host(target[rows]))
        narrow = np.dtype(min(table.dtype, expected.dtype, key=lambda t: t.itemsize))
        if not np.array_equal(table[rows].astype(narrow), expected.astype(narrow)):
            return table
    return None
