"""Folders of rows with given tokens."""

import json
import pathlib
from typing import Any

import numpy as np


def save_rows(
    folder: pathlib.Path,
    tokens: np.ndarray,
    segment_ids: np.ndarray,
    loss_mask: np.ndarray | None = None,
    **header: Any,
) -> None:
    """Writes rows `[B, T]` of two documents each; `header` changes `rows.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", tokens.astype(np.uint16))
    np.save(folder / "segment_ids.npy", segment_ids.astype(np.uint16))
    if loss_mask is not None:
        np.save(folder / "loss_mask.npy", loss_mask)
    rows, length = tokens.shape
    fields = {
        "format": 1,
        "rows": rows,
        "length": length,
        "tokens": int(np.count_nonzero(segment_ids)),
        "documents": 2 * rows,
        "loss_mask": loss_mask is not None,
        "split": "train",
        "vocabulary": "gpt3",
        "vocab_size": 50257,
        "end_of_text": 50256,
        "fingerprint": {"length": length},
    }
    (folder / "rows.json").write_text(json.dumps(fields | header))


def save_indices(
    folder: pathlib.Path, rows: int, first: int = 0, **header: Any
) -> None:
    """Writes rows of four tokens whose first is their index, counted from `first`."""
    tokens = np.arange(first, first + rows)[:, None] + np.arange(4) * 100
    save_rows(folder, tokens, np.tile([1, 1, 2, 0], (rows, 1)), **header)
