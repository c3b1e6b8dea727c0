"""Folders of tensors and settings that other engines read."""

import json
import os
import shlex
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from bpd_jax.base.errors import UserError
from bpd_jax.pretrained.json_files import CONFIG
from bpd_jax.storage import files, folders

_DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
TENSOR_DTYPES = tuple(_DTYPES)


def as_stored(name: str, value: Any, dtype: str) -> np.ndarray:
    """Returns an array in one of `TENSOR_DTYPES`, contiguous and on the host."""
    # A number too large for float16 is reported below.
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(jax.device_get(value), _DTYPES[dtype])
    if dtype == "float16" and not np.isfinite(stored).all():
        raise UserError(f"{name} has numbers beyond float16: choose bfloat16.")
    return stored


def write_folder(
    folder: str | os.PathLike[str],
    kind: folders.FolderKind,
    file: str,
    tensors: dict[str, np.ndarray],
    settings: Mapping[str, Any],
) -> None:
    """Writes tensors and config.json atomically, in place of an older such folder."""
    with folders.replacing_folder(folder, kind) as temporary:
        # Readers of transformers' files expect this entry.
        save_file(tensors, temporary / file, metadata={"format": "pt"})
        files.write_json(temporary / CONFIG, settings)


def vllm_command(base: str, method: str, folder: str, num_tokens: int) -> str:
    """Returns the command that starts vLLM with an exported drafter.

    >>> print(vllm_command("base", "medusa", "exported", 8))
    vllm serve base --speculative-config '{"method": "medusa", "model": "exported", \
"num_speculative_tokens": 8}'
    """
    settings = {
        "method": method,
        "model": folder,
        "num_speculative_tokens": num_tokens,
    }
    return shlex.join(
        ["vllm", "serve", base, "--speculative-config", json.dumps(settings)]
    )
