"""Files of recorded texts, and digests of model files."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import read_npz
from bpd_jax.decoding.recording import RecordedText
from bpd_jax.storage import files
from bpd_jax.storage.paths import local_copy

_FIELDS = ("input_ids", "output_ids", "candidates", "log_probs", "entropies")
# Predictions of a block drafter, if the texts were recorded with one; the factors are
# those of a drafter whose Markov head reads its states.
_DRAFTER = (
    "drafter_candidates",
    "drafter_log_probs",
    "drafter_entropies",
    "drafter_factors",
)
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
        names = _DRAFTER[: len(drafts[0])]
        columns |= dict(zip(names, zip(*drafts, strict=True), strict=True))
    for name, parts in columns.items():
        arrays[name] = np.concatenate(parts)
        arrays[f"{name}_lengths"] = np.array([len(part) for part in parts])
    files.write_npz(path, {"digest": digest, **arrays})


def load_texts(path: str | os.PathLike[str], digest: str) -> list[RecordedText] | None:
    """Reads recorded texts.

    Returns:
      None if the file is missing or has another digest.
    """
    try:
        arrays = read_npz(local_copy(path))
        if str(arrays["digest"]) != digest:
            return None
        columns = {
            name: np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"])[:-1])
            for name in (*_FIELDS, *(x for x in _DRAFTER if x in arrays))
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read {path} ({error}): remove it.") from error
    drafts = [columns.pop(name) for name in _DRAFTER if name in columns]
    texts = [RecordedText(*fields) for fields in zip(*columns.values(), strict=True)]
    if not drafts:
        return texts
    return [
        dataclasses.replace(text, drafter=predictions)
        for text, predictions in zip(texts, zip(*drafts, strict=True), strict=True)
    ]
