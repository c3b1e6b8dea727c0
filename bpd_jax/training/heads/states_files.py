"""The files of a cache of states: header, shards and their names.

A folder contains `states.json`, which identifies the model, shards of states, which are
memory-mapped, and, when the states are complete, the texts in `texts.npz`. The name of
a shard contains the hash of its texts.
"""

import hashlib
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import Generations
from bpd_jax.storage import array_files, files, folders
from bpd_jax.storage.artifacts import Artifact
from bpd_jax.storage.paths import as_path, in_bucket
from bpd_jax.training.heads.frozen_states import states_dtype

HEADER, TEXTS = "states.json", "texts.npz"
KIND = Artifact(
    "cached states",
    HEADER,
    in_place=True,
    remedy="train heads with HeadsTrainConfig.mode = 'cache'",
)

# Bytes of a shard, which is computed in memory.
_SHARD_BYTES = 2**26


def describe_states(
    fingerprint: str,
    d_model: int,
    layers: tuple[int, ...],
    *,
    dtype: str,
    products: str,
    include_prompts: bool,
) -> dict[str, Any]:
    """The header of a cache.

    Args:
      fingerprint: fingerprint of the model.
      d_model: width of the model.
      layers: layers whose outputs are part of a state, after the final hidden state.
      dtype: dtype of the states, float16 or bfloat16.
      products: precision of the model's products; see `FrozenModel`.
      include_prompts: whether the positions in prompts are included.
    """
    return {
        "base": fingerprint,
        "d_model": d_model,
        "layers": list(layers),
        "dtype": dtype,
        "products": products,
        "include_prompts": include_prompts,
    }


def check_states(folder: str | os.PathLike[str], header: dict[str, Any]) -> None:
    """Raises a `UserError` if a folder holds other files or states than `header`."""
    folder = as_path(folder)
    if in_bucket(folder):
        raise UserError(
            f"{folder}: states are memory-mapped: choose a folder on a local disk."
        )
    folders.check_folder(folder, KIND)
    if (folder / HEADER).exists():
        check_header(folder, header)


def check_header(folder: pathlib.Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Reads the header of a cache; raises a `UserError` if it has other values."""
    header = read_header(folder)
    for name, value in expected.items():
        if header.get(name) != value:
            raise UserError(
                f"{folder} holds states with {name} = {header.get(name)!r}, and this "
                f"run needs {value!r}: choose another folder, or remove this one."
            )
    return header


def read_header(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the header of a cache; raises a `UserError` if a value has another type."""
    fields = {"base": str, "d_model": int, "dtype": str}
    header = {"layers": [], **KIND.read_header(folder, fields)}
    with KIND.reading(folder / HEADER):
        layers = header["layers"]
        if type(layers) is not list or any(type(n) is not int for n in layers):
            raise ValueError("layers is not a list of integers")
        if type(header.get("include_prompts")) is not bool:
            raise ValueError("include_prompts is missing or of another type")
        if header["d_model"] < 1 or states_dtype(header["dtype"]).itemsize != 2:
            raise ValueError("its states are not of a width and a dtype of states")
    return header


def stored_header(folder: pathlib.Path) -> dict[str, Any]:
    """The header of a cache; empty if there is none or it cannot be read."""
    try:
        return read_header(folder)
    except UserError:
        return {}


class Shard(NamedTuple):
    """A file with the states of some texts.

    Attributes:
      rows: indices of the texts.
      path: path of the file.
      shape: number and width of the states.
    """

    rows: range
    path: pathlib.Path
    shape: tuple[int, int]

    @property
    def is_complete(self) -> bool:
        try:
            array = array_files.open_npy(self.path)
        except (OSError, ValueError):
            return False
        return array.shape == self.shape and array.dtype == np.uint16


def shards_of(
    folder: pathlib.Path, texts: Generations, counts: np.ndarray, width: int
) -> list[Shard]:
    """The shards of some texts, the full ones of which do not depend on later texts."""
    limit = full_shard(width)
    shards: list[Shard] = []
    first, size = 0, 0
    for row, count in enumerate(counts.tolist()):
        size += count
        if size and (size >= limit or row == len(counts) - 1):
            rows = range(first, row + 1)
            name = shard_name(
                len(shards),
                texts.tokens[texts.offsets[first] : texts.offsets[row + 1]],
                texts.lengths[first : row + 1],
                texts.prompt_lengths[first : row + 1],
            )
            shards.append(Shard(rows, folder / name, (size, width)))
            first, size = row + 1, 0
    return shards


def full_shard(width: int) -> int:
    """Number of states from which on a shard is full."""
    return max(1, _SHARD_BYTES // (2 * width))


def shard_name(
    number: int,
    tokens: np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    prompt_lengths: Sequence[int] | np.ndarray,
) -> str:
    """The name of a shard with the states of some texts."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes())
    for values in (lengths, prompt_lengths):
        digest.update(np.asarray(values, np.int64).tobytes())
    return f"states-{number:05d}-{digest.hexdigest()[:12]}.npy"


def cache_bytes(positions: int, width: int) -> int:
    """Bytes of stored states, which are in half precision."""
    return 2 * positions * width


def free_bytes(folder: pathlib.Path) -> tuple[int, pathlib.Path]:
    """Free bytes on the disk of a folder, and its nearest existing parent or itself."""
    nearest = next(
        p for p in (folder.absolute(), *folder.absolute().parents) if p.exists()
    )
    return shutil.disk_usage(nearest).free, nearest


def save_states(path: pathlib.Path, states: np.ndarray) -> None:
    with files.replacing_file(path) as temporary, temporary.open("wb") as stream:
        np.save(stream, states.view(np.uint16))


def mapped_states(path: pathlib.Path, dtype: np.dtype) -> np.ndarray:
    # .npy files have no bfloat16, so both dtypes are stored as uint16 bit patterns.
    return array_files.open_npy(path).view(dtype)
