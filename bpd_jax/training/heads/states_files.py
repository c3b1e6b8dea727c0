"""The files of a cache of states: header and shards; a writer of both.

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
from bpd_jax.base.reading import open_npy, read_npz
from bpd_jax.data.generations import Generations, fit_together, specs_of_texts
from bpd_jax.storage import files, folders
from bpd_jax.storage.folders import Artifact
from bpd_jax.storage.paths import as_path, in_bucket, local_copy
from bpd_jax.training.heads.frozen_states import check_finite, states_dtype

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
    """The header of a cache; see `FrozenModel` and `cached_states`."""
    return {
        "base": fingerprint,
        "d_model": d_model,
        "layers": list(layers),
        "dtype": dtype,
        "products": products,
        "include_prompts": include_prompts,
    }


def check_states(folder: str | os.PathLike[str], header: dict[str, Any]) -> None:
    """Checks that a folder holds nothing but states with this `header`."""
    folder = as_path(folder)
    if in_bucket(folder):
        raise UserError(
            f"{folder}: states are memory-mapped: choose a folder on a local disk."
        )
    folders.check_folder(folder, KIND)
    if (folder / HEADER).exists():
        check_header(folder, header)


def check_header(folder: pathlib.Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Reads the header of a cache, whose values must be those of `expected`."""
    header = read_header(folder)
    for name, value in expected.items():
        if header.get(name) != value:
            raise UserError(
                f"{folder} holds states with {name} = {header.get(name)!r}, and this "
                f"run needs {value!r}: choose another folder, or remove this one."
            )
    return header


def read_header(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the header of a cache and checks the types of its values."""
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


def read_texts(folder: pathlib.Path, base: str) -> Generations:
    """Reads the texts of a complete cache."""
    with KIND.reading(folder / TEXTS):
        arrays = read_npz(
            local_copy(folder / TEXTS), specs_of_texts(None), optional=("indices",)
        )
        if not fit_together(**arrays):
            raise ValueError("its texts do not match their offsets")
    return Generations(folder, **arrays, base=base, vocab_size=0, facts={})


def check_extends(folder: pathlib.Path, texts: Generations, base: str) -> bool:
    """Whether a cache is complete; a `UserError` if its texts do not begin `texts`."""
    try:
        old = read_texts(folder, base)
    except UserError:
        # The cache was never completed. Shards of other texts have other names.
        return False
    if not all(
        np.array_equal(earlier, new[: len(earlier)])
        for earlier, new in (
            (old.tokens, texts.tokens),
            (old.offsets, texts.offsets),
            (old.prompt_lengths, texts.prompt_lengths),
        )
    ):
        raise UserError(
            f"{folder} holds states of other texts than those of {texts.folder}: "
            "choose another folder with HeadsTrainConfig.states, or remove this one."
        )
    return True


class Shard(NamedTuple):
    """A file with the states of some texts.

    Attributes:
      rows: indices of the texts.
      shape: number and width of the states.
    """

    rows: range
    path: pathlib.Path
    shape: tuple[int, int]

    @property
    def is_complete(self) -> bool:
        try:
            array = open_npy(self.path)
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
    digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes())
    for values in (lengths, prompt_lengths):
        digest.update(np.asarray(values, np.int64).tobytes())
    return f"states-{number:05d}-{digest.hexdigest()[:12]}.npy"


def cache_bytes(positions: int, width: int) -> int:
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
    return open_npy(path).view(dtype)


class StatesWriter:
    """Writes the states of texts in the order in which the texts are generated.

    Its shards are those of `cached_states`, which computes what is missing: shards with
    texts of which only the tokens are known.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        header: dict[str, Any],
        texts: Generations | None,
    ) -> None:
        """Continues a cache after the texts that exist already. Writes nothing.

        `header` is from `describe_states`, `texts` are those that exist already. The
        folder is created with the first shard.
        """
        self._folder, self._header = as_path(folder), header
        check_states(self._folder, header)
        if texts is not None:
            check_extends(self._folder, texts, header["base"])
        elif (self._folder / TEXTS).exists():
            raise UserError(
                f"{self._folder} holds states of other texts: choose another folder, "
                "or remove this one."
            )
        self._width = header["d_model"] * (1 + len(header["layers"]))
        self._names: list[str] = []
        self._texts: list[np.ndarray] = []
        self._prompt_lengths: list[int] = []
        # None for a text without states.
        self._states: list[np.ndarray | None] = []
        self._size = 0
        for row in range(0 if texts is None else len(texts)):
            assert texts is not None
            self._append(texts[row], int(texts.prompt_lengths[row]), None)

    def describe_size(self, prompts: Sequence[np.ndarray], new_tokens: int) -> str:
        """One line: the space that states of the texts take, and what is free."""
        positions = len(prompts) * new_tokens
        if self._header["include_prompts"]:
            positions += sum(len(prompt) - 1 for prompt in prompts)
        needed = cache_bytes(positions, self._width)
        free, nearest = free_bytes(self._folder)
        return (
            f"states: at most {needed / 1e9:,.1f} GB; {nearest} has {free / 1e9:,.1f} "
            "GB free."
        )

    def add(self, text: np.ndarray, prompt_length: int, states: np.ndarray) -> None:
        """Adds a text.

        `states`, `[T, C]`, are those after its tokens, of which that of the last one is
        not needed.
        """
        # A copy: `states` may have room for a longer text.
        kept = states[self._skipped(prompt_length) : len(text) - 1].copy()
        check_finite(kept)
        self._append(text, prompt_length, kept)

    def close(self) -> None:
        """Writes the last shard, and removes those of texts that were not written."""
        if self._texts:
            self._write()
        remove_others(self._folder, self._names)

    def _skipped(self, prompt_length: int) -> int:
        """Number of states at a text's beginning that are not stored."""
        return 0 if self._header["include_prompts"] else max(prompt_length - 1, 0)

    def _append(
        self, text: np.ndarray, prompt_length: int, states: np.ndarray | None
    ) -> None:
        self._texts.append(text)
        self._prompt_lengths.append(prompt_length)
        self._states.append(states)
        self._size += len(text) - 1 - self._skipped(prompt_length)
        if self._size >= full_shard(self._width):
            self._write()

    def _write(self) -> None:
        """Writes a shard, unless some of its states are missing."""
        lengths = [len(text) for text in self._texts]
        tokens = np.concatenate(self._texts)
        name = shard_name(len(self._names), tokens, lengths, self._prompt_lengths)
        states = [part for part in self._states if part is not None]
        if len(states) == len(self._texts):
            KIND.write_header(self._folder, self._header)
            save_states(self._folder / name, np.concatenate(states))
        self._names.append(name)
        self._texts, self._prompt_lengths, self._states = [], [], []
        self._size = 0


def remove_others(folder: pathlib.Path, names: Sequence[str]) -> None:
    """Removes all shards of a folder but those with the given names."""
    for path in folder.glob("states-*.npy"):
        if path.name not in names:
            path.unlink(missing_ok=True)
