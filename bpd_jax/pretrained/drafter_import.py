"""Imports published block drafters; `drafter_layout` describes the layouts.

A drafter that bpd_jax cannot compute exactly is refused.
"""

import hashlib
import os
import pathlib

import jax
import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Params
from bpd_jax.models.attachments import check_finite, check_vocabulary, fingerprint
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_files import LoadedDrafter
from bpd_jax.pretrained.drafter_description import describe
from bpd_jax.pretrained.drafter_layout import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    SOFTMAX,
    TARGET_IN_DRAFT,
    UNUSED,
    drafter_layout,
)
from bpd_jax.pretrained.json_files import Fields, naming
from bpd_jax.pretrained.pretrained_checkpoint import read_tensor
from bpd_jax.pretrained.safetensors_files import (
    CONFIG,
    SafetensorsFiles,
    open_checkpoint,
)
from bpd_jax.storage.paths import as_path
from bpd_jax.storage.tensors import file_digest

# Rows of an embedding or softmax compared at once.
_ROWS = 4096
# Quantisation of the target changes its embeddings by a few percent.
_SAME_EMBEDDING = 0.1


def import_drafter(
    folder: str | os.PathLike[str],
    model: BlockwiseConfig,
    params: Params,
    *,
    name: str = "this model",
    base: str | None = None,
) -> LoadedDrafter:
    """Reads a published block drafter of a model.

    The files do not record the model exactly; its width, its vocabulary and, where the
    drafter has embeddings of its own, these are compared.

    Args:
      folder: folder with config.json and safetensors files.
      model: the target model.
      params: parameters of the target.
      name: name of the target for messages.
      base: fingerprint of the target; None to compute it from `params`, which then have
        the layout in which they were stored.

    Returns:
      The drafter, with tensors in their stored precision. It has its own softmax if
      that differs from the target's.

    Raises:
      UserError: the drafter is missing, damaged, not supported, or belongs to another
        model.
    """
    folder = as_path(folder)
    fields = Fields.read(folder / CONFIG)
    tensors = open_checkpoint(folder)
    about = describe(fields, tensors.names)
    trunk = model.trunk
    sizes = (about.d_model, about.vocab_size)
    if sizes != (trunk.d_model, trunk.vocab_size):
        raise UserError(
            f"the block drafter in {folder} is for a model of width {sizes[0]} with "
            f"{sizes[1]} tokens, but {name} has width {trunk.d_model} and "
            f"{trunk.vocab_size} tokens: give a drafter of {name}."
        )
    if about.after_norm(trunk.num_layers):
        raise UserError(
            f"{fields.source} reads the last of the {trunk.num_layers} layers of "
            f"{name} after its final norm, which cannot be reproduced here: layers are "
            "read before it."
        )
    with naming(fields.source):
        config = about.config.resolve(trunk)
    layout = drafter_layout(config, trunk)
    _check_names(folder, tensors.names, {origin.name for origin in layout.values()})
    with naming(folder):
        arrays: dict[str, np.ndarray] = {
            path: origin.convert(read_tensor(tensors, origin))
            for path, origin in layout.items()
        }
    if config.draft_vocabulary is not None:
        arrays["vocabulary"] = _vocabulary(folder, tensors, config, trunk.vocab_size)
    embedding = params["trunk"]["embedding"]
    arrays["mask_embedding"] = _mask_embedding(
        folder, tensors, embedding, about.mask_token
    )
    softmax = _own_softmax(
        folder, tensors, softmax_rows(model, params, arrays.get("vocabulary"))
    )
    if softmax is not None:
        arrays["softmax"] = softmax
    check_finite(arrays, folder)
    return LoadedDrafter(
        config=config,
        tensors=arrays,
        base=base or fingerprint(model, params),
        base_name=name,
        d_model=trunk.d_model,
        vocab_size=trunk.vocab_size,
        facts={"imported_from": folder.resolve().name},
        folder=folder,
        identity=_identity(folder),
    )


def _check_names(folder: pathlib.Path, names: set[str], expected: set[str]) -> None:
    """Refuses unknown tensors."""
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


def _vocabulary(
    folder: pathlib.Path,
    tensors: SafetensorsFiles,
    config: BlockDrafterConfig,
    vocab_size: int,
) -> np.ndarray:
    """The ids of the draft vocabulary, `[V']` int32."""
    distances = tensors.read_integers(DRAFT_TO_TARGET)
    if distances.shape != (config.draft_vocabulary,):
        raise UserError(
            f"{DRAFT_TO_TARGET} of {folder} has shape {list(distances.shape)}, but "
            f"{CONFIG} declares {config.draft_vocabulary} tokens: the folder is "
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


def _mask_embedding(
    folder: pathlib.Path, tensors: SafetensorsFiles, embedding: Array, token: int
) -> np.ndarray:
    """The mask embedding.

    Raises:
      UserError: the other rows of the drafter's embedding are not the target's.
    """
    if EMBEDDING not in tensors.names:
        return np.asarray(embedding[token], np.float32)
    embeddings = _table(folder, tensors, EMBEDDING, embedding.shape)
    difference = size = 0.0
    for begin in range(0, len(embeddings), _ROWS):
        rows = slice(begin, begin + _ROWS)
        expected = np.array(jax.device_get(embedding[rows]), np.float32)
        actual = np.array(embeddings[rows], np.float32)
        if begin <= token < begin + len(actual):
            actual[token - begin] = expected[token - begin]
        difference += float(np.square(actual - expected).sum())
        size += float(np.square(expected).sum())
    if not difference <= _SAME_EMBEDDING**2 * size:
        raise UserError(
            f"the embeddings of the block drafter in {folder} differ from those of "
            "the model: it belongs to another model."
        )
    return np.asarray(embeddings[token], np.float32)


def _own_softmax(
    folder: pathlib.Path, tensors: SafetensorsFiles, softmax: Array
) -> np.ndarray | None:
    """The drafter's softmax; None if it equals the target's in the file's precision."""
    if SOFTMAX not in tensors.names:
        return None
    matrix = _table(folder, tensors, SOFTMAX, softmax.shape)
    for begin in range(0, len(matrix), _ROWS):
        rows = slice(begin, begin + _ROWS)
        expected = np.asarray(jax.device_get(softmax[rows]))
        narrow = np.dtype(min(matrix.dtype, expected.dtype, key=lambda t: t.itemsize))
        if not np.array_equal(matrix[rows].astype(narrow), expected.astype(narrow)):
            return matrix
    return None


def _identity(folder: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for path in [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]:
        digest.update(bytes.fromhex(file_digest(path)))
    return digest.hexdigest()[:16]
