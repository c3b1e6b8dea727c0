"""Files of recorded texts, and digests of model files."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.recording import RecordedText
from bpd_jax.storage import array_files

_FIELDS = ("input_ids", "output_ids", "candidates", "log_probs", "entropies", "hidden")
# Predictions of a block drafter, if the texts were recorded with one.
_DRAFTER = ("drafter_candidates", "drafter_log_probs", "drafter_entropies")
# Those of a drafter whose Markov head reads its states.
_FACTORS = "drafter_factors"
# Kind of dtype and number of axes of the arrays; numpy has no name for bfloat16 (V),
# which hidden states may have.
_KINDS = {
    "input_ids": ("i", 1),
    "output_ids": ("i", 1),
    "candidates": ("i", 3),
    "log_probs": ("f", 3),
    "entropies": ("f", 2),
    "hidden": ("fV", 2),
    "factors": ("f", 3),
}
# Number of bytes at the beginning and at the end of each file that a digest covers;
# models with the same header may differ only at the end.
_BYTES_READ = 1 << 20


def content_digest(path: pathlib.Path) -> str:
    """A digest of the names, sizes, first and last bytes of a file or folder."""
    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in paths:
        if file.is_file():
            size = file.stat().st_size
            with file.open("rb") as stream:
                digest.update(f"{file.name} {size} ".encode())
                digest.update(stream.read(_BYTES_READ))
                stream.seek(max(stream.tell(), size - _BYTES_READ))
                digest.update(stream.read(_BYTES_READ))
    return digest.hexdigest()


def save_texts(path: pathlib.Path, digest: str, texts: Sequence[RecordedText]) -> None:
    """Writes recorded texts; all or none of them have a block drafter's predictions."""
    arrays: dict[str, Any] = {}
    columns = {name: [getattr(text, name) for text in texts] for name in _FIELDS}
    drafts = [text.drafter for text in texts if text.drafter is not None]
    if drafts:
        names = (*_DRAFTER, _FACTORS)[: len(drafts[0])]
        columns |= dict(zip(names, zip(*drafts, strict=True), strict=True))
    for name, parts in columns.items():
        arrays[name] = np.concatenate(parts)
        arrays[f"{name}_lengths"] = np.array([len(part) for part in parts])
    array_files.write_npz(path, {"digest": digest, **arrays})


def load_texts(path: str | os.PathLike[str], digest: str) -> list[RecordedText] | None:
    """Reads recorded texts.

    Returns:
      None if the file is missing or has another digest.

    Raises:
      UserError: the file is damaged.
    """
    try:
        arrays = array_files.read_npz(path)
        if str(arrays["digest"]) != digest:
            return None
        _check(arrays)
        columns = {
            name: np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"])[:-1])
            for name in (*_FIELDS, *_DRAFTER, _FACTORS)
            if name in arrays
        }
    except FileNotFoundError:
        return None
    except KeyError as error:
        raise UserError(f"cannot read {path} (no array {error}): remove it.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}): remove it.") from error
    names = (*_DRAFTER, _FACTORS)
    drafts = [columns.pop(name) for name in names if name in columns]
    texts = [RecordedText(*fields) for fields in zip(*columns.values(), strict=True)]
    if not drafts:
        return texts
    return [
        dataclasses.replace(text, drafter=predictions)
        for text, predictions in zip(texts, zip(*drafts, strict=True), strict=True)
    ]


def _check(arrays: Mapping[str, np.ndarray]) -> None:
    """Checks that arrays which `save_texts` wrote fit together.

    Raises:
      KeyError, ValueError: an array is missing, or has another type or shape.
    """
    has_drafter = any(name in arrays for name in _DRAFTER)
    sizes = arrays["output_ids_lengths"]
    factors = (_FACTORS,) if _FACTORS in arrays else ()
    for name in (*_FIELDS, *(_DRAFTER if has_drafter else ()), *factors):
        array, lengths = arrays[name], arrays[f"{name}_lengths"]
        kinds, axes = _KINDS[name.removeprefix("drafter_")]
        if (
            array.dtype.kind not in kinds
            or array.ndim != axes
            or lengths.dtype.kind != "i"
            or lengths.shape != sizes.shape[:1]
            # A sum could overflow; no text is longer than all texts together.
            or not ((lengths >= 0) & (lengths <= len(array))).all()
            or lengths.sum() != len(array)
            # All arrays but the prompts have a row for each token of a text.
            or (name != "input_ids" and (lengths != sizes).any())
        ):
            raise ValueError(f"{name} does not fit the other arrays")
    for prefix in ("", "drafter_") if has_drafter else ("",):
        candidates = arrays[f"{prefix}candidates"].shape
        positions = arrays[f"{prefix}entropies"].shape[1] - (not prefix)
        scores = arrays[f"{prefix}log_probs"].shape
        if candidates != scores or candidates[1] != positions:
            raise ValueError(f"{prefix}candidates has another shape than its scores")
