"""The frozen model's states on disk: computed once, used by every training of heads.

A folder holds `states.json`, which says whose states they are, shards of states that
are mapped into memory, and, once they are complete, the texts in `texts.npz`. A shard
belongs to some texts and is named by their hash: a run that was killed resumes with the
first one that is missing, and texts that were added later cost only their own states.
"""

import hashlib
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from bpd_jax import array_files, files, folders, progress
from bpd_jax.artifacts import Artifact
from bpd_jax.buckets import as_path
from bpd_jax.data.generations import Generations, fit_together, specs_of_texts
from bpd_jax.errors import UserError
from bpd_jax.training.heads.base import Base, states_dtype
from bpd_jax.training.heads.positions import (
    Positions,
    position_counts,
    positions_of,
)

HEADER, TEXTS = "states.json", "texts.npz"
KIND = Artifact(
    "cached states",
    HEADER,
    in_place=True,
    remedy="train heads with HeadsTrainConfig.mode = 'cache'",
)

# Bytes of a shard, and so what making one keeps in memory.
_SHARD_BYTES = 2**26


class States:
    """The states of all positions, read from disk as they are needed."""

    def __init__(
        self,
        positions: Positions,
        shards: Sequence[np.ndarray],
        stored: np.ndarray | None = None,
        columns: np.ndarray | None = None,
    ) -> None:
        """Takes the positions and their states.

        Args:
          positions: whose states are read.
          shards: stored states, in order.
          stored: `[P]`, where the state of every position is stored; None if the
            stored states are those of the positions, in the same order.
          columns: numbers of a stored state that are read; None for all.
        """
        self.positions = positions
        self._shards = shards
        self._bounds = np.cumsum([0, *map(len, shards)])
        self._stored, self._columns = stored, columns
        assert self._bounds[-1] == len(positions) or stored is not None

    @property
    def width(self) -> int:
        """Numbers of a state."""
        width = self._shards[0].shape[1]
        return width if self._columns is None else len(self._columns)

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers."""
        return self._shards[0].dtype

    def read(self, indices: np.ndarray) -> np.ndarray:
        """States `[n, C]` of some positions."""
        if self._stored is not None:
            indices = self._stored[indices]
        found = np.empty((len(indices), self.width), self._shards[0].dtype)
        where = np.searchsorted(self._bounds, indices, side="right") - 1
        for number in np.unique(where):
            here = where == number
            places = indices[here] - self._bounds[number]
            # In ascending order neighbours on disk are read together.
            order = np.argsort(places)
            rows = self._shards[number][places[order]]
            if self._columns is not None:
                rows = rows[:, self._columns]
            found[np.flatnonzero(here)[order]] = rows
        return found


def cache_bytes(positions: int, width: int) -> int:
    """Bytes that states take, on disk or in a ring: two for each number."""
    return 2 * positions * width


def cached_states(
    folder: str | os.PathLike[str],
    texts: Generations,
    base: Base,
    fingerprint: str,
    *,
    include_prompts: bool,
) -> States:
    """Opens the states of some texts, after computing those that are missing.

    A folder that holds more (more layers, prompts too) serves as well.

    Args:
      folder: of the cache; it is made if need be.
      texts: generated texts.
      base: the model, with the layers whose outputs are wanted.
      fingerprint: of the model.
      include_prompts: whether positions in prompts count as well.

    Raises:
      UserError: the folder holds states of another model or of other texts, or the
        disk lacks room.
    """
    folder = as_path(folder)
    layers, wanted_prompts = base.layers, include_prompts
    stored = _stored(folder)
    if stored and set(layers) <= set(stored["layers"]):
        base = base.with_layers(tuple(stored["layers"]))
    include_prompts = include_prompts or stored.get("include_prompts") is True
    header: dict[str, Any] = {
        "base": fingerprint,
        "d_model": base.d_model,
        "layers": list(base.layers),
        "dtype": base.dtype.name,
        "include_prompts": include_prompts,
    }
    folders.check_folder(folder, KIND)
    if (folder / HEADER).exists():
        _check_header(folder, header)
    earlier = _earlier_shards(folder, texts, header)
    counts = position_counts(texts.lengths, texts.prompt_lengths, include_prompts)
    width = base.width
    shards = _shards(folder, texts, counts, width)
    sizes = [int(counts[rows.start : rows.stop].sum()) for rows, _ in shards]
    missing = [
        (rows, path, size)
        for (rows, path), size in zip(shards, sizes, strict=True)
        if not _is_whole(path, (size, width))
    ]
    _check_room(folder, cache_bytes(sum(size for *_, size in missing), width))
    if missing:
        done = sum(sizes) - sum(size for *_, size in missing)
        with progress.bar(
            label="base states",
            total=sum(sizes),
            initial=done,
            unit="position",
            unit_scale=True,
        ) as bar:
            for rows, path, _ in missing:
                states = _read(base, texts, rows, counts, bar)
                KIND.write_header(folder, header)
                _save(path, states)
    # The last shard was not full and has given way to one with more texts.
    for path in earlier - {path for _, path in shards}:
        path.unlink(missing_ok=True)
    with files.replacing_file(folder / TEXTS) as path, path.open("wb") as stream:
        np.savez(
            stream,
            tokens=texts.tokens,
            offsets=texts.offsets,
            prompt_lengths=texts.prompt_lengths,
        )
    arrays = [_mapped(path, base.dtype) for _, path in shards]
    positions = positions_of(texts, wanted_prompts)
    places = None
    if wanted_prompts != include_prompts:
        # The stored positions of a text are all of its tokens but the last.
        places = positions.places - positions.rows
    return States(positions, arrays, places, _columns(base, layers))


def _columns(base: Base, layers: tuple[int, ...]) -> np.ndarray | None:
    """Where the final hidden state and some layers stand in the states of `base`."""
    if layers == base.layers:
        return None
    blocks = [0, *(1 + base.layers.index(layer) for layer in layers)]
    width = base.d_model
    return (np.array(blocks)[:, None] * width + np.arange(width)).ravel()


def _stored(folder: pathlib.Path) -> dict[str, Any]:
    """The header of a cache; empty if there is none or it cannot be read."""
    try:
        return {"layers": [], **KIND.read_header(folder)}
    except UserError:
        return {}


def _check_header(folder: pathlib.Path, mine: dict[str, Any]) -> dict[str, Any]:
    """The header of a cache; raises a `UserError` unless it has these values."""
    theirs = {"layers": [], **KIND.read_header(folder)}
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise UserError(
                f"{folder} holds states of {name} {theirs.get(name)!r}, and this "
                f"training needs {value!r}: choose another folder, or remove this one."
            )
    return theirs


def _earlier_shards(
    folder: pathlib.Path, texts: Generations, header: dict[str, Any]
) -> set[pathlib.Path]:
    """The shards of the texts that the cache was completed for; there may be none.

    Raises:
      UserError: the new texts do not begin with those.
    """
    try:
        old = _read_texts(folder, header["base"])
    except UserError:
        # Never completed. Shards of other texts have other names, and stay.
        return set()
    goes_on = all(
        np.array_equal(mine, theirs[: len(mine)])
        for mine, theirs in (
            (old.tokens, texts.tokens),
            (old.offsets, texts.offsets),
            (old.prompt_lengths, texts.prompt_lengths),
        )
    )
    if not goes_on:
        raise UserError(
            f"{folder} holds states of other texts than those of {texts.folder}: "
            "choose another folder with HeadsTrainConfig.states, or remove this one."
        )
    counts = position_counts(old.lengths, old.prompt_lengths, header["include_prompts"])
    width = header["d_model"] * (1 + len(header["layers"]))
    return {path for _, path in _shards(folder, old, counts, width)}


def _shards(
    folder: pathlib.Path, texts: Generations, counts: np.ndarray, width: int
) -> list[tuple[range, pathlib.Path]]:
    """Texts and file of each shard."""
    return [
        (rows, folder / f"states-{number:05d}-{_hash(texts, rows)}.npy")
        for number, rows in enumerate(_shard_rows(counts, width))
    ]


def _shard_rows(counts: np.ndarray, width: int) -> list[range]:
    """Texts of each shard; they depend on the texts before, not on those after."""
    limit = max(1, _SHARD_BYTES // (2 * width))
    found, first, size = [], 0, 0
    for row, count in enumerate(counts.tolist()):
        size += count
        if size >= limit:
            found.append(range(first, row + 1))
            first, size = row + 1, 0
    if size:
        found.append(range(first, len(counts)))
    return found


def _hash(texts: Generations, rows: range) -> str:
    tokens = texts.tokens[texts.offsets[rows.start] : texts.offsets[rows.stop]]
    digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes())
    digest.update(texts.lengths[rows.start : rows.stop].astype(np.int64).tobytes())
    prompts = texts.prompt_lengths[rows.start : rows.stop]
    digest.update(prompts.astype(np.int64).tobytes())
    return digest.hexdigest()[:12]


def _is_whole(path: pathlib.Path, shape: tuple[int, int]) -> bool:
    try:
        found = array_files.open_npy(path)
    except (OSError, ValueError):
        return False
    return found.shape == shape and found.dtype == np.uint16


def _mapped(path: pathlib.Path, dtype: np.dtype) -> np.ndarray:
    # numpy's files know no bfloat16: both types are stored as their bits.
    return array_files.open_npy(path).view(dtype)


def _check_room(folder: pathlib.Path, needed: int) -> None:
    nearest = next(
        p for p in (folder.absolute(), *folder.absolute().parents) if p.exists()
    )
    free = shutil.disk_usage(nearest).free
    if needed > free:
        raise UserError(
            f"the states take {needed / 1e9:.2f} GB and {nearest} has only "
            f"{free / 1e9:.2f} GB free: make room, choose another folder with "
            "HeadsTrainConfig.states, or set HeadsTrainConfig.mode = 'ring'."
        )


def _read(
    base: Base, texts: Generations, rows: range, counts: np.ndarray, bar: progress.tqdm
) -> np.ndarray:
    """The states of all positions of some texts."""
    starts = np.concatenate([[0], np.cumsum(counts[rows.start : rows.stop])])
    states = np.empty((starts[-1], base.width), base.dtype)
    for number, found in base.states([texts[row] for row in rows]):
        first, last = starts[number], starts[number + 1]
        # The state of the last token has nothing to guess.
        states[first:last] = found[len(found) - 1 - (last - first) : -1]
        bar.update(last - first)
    return states


def _save(path: pathlib.Path, states: np.ndarray) -> None:
    with files.replacing_file(path) as temporary, temporary.open("wb") as stream:
        np.save(stream, states.view(np.uint16))


def open_states(folder: str | os.PathLike[str], fingerprint: str) -> States:
    """Opens the final hidden states of a cache without its texts' folder.

    Raises:
      UserError: it is missing, incomplete, or of another model than `fingerprint`.
    """
    folder = as_path(folder)
    header = _check_header(folder, {"base": fingerprint})
    with KIND.reading(folder / HEADER):
        dtype, d_model = states_dtype(header["dtype"]), int(header["d_model"])
        width = d_model * (1 + len(header["layers"]))
        include_prompts = bool(header["include_prompts"])
    texts = _read_texts(folder, fingerprint)
    positions = positions_of(texts, include_prompts)
    shards = []
    counts = np.diff(positions.starts)
    for rows, path in _shards(folder, texts, counts, width):
        size = int(counts[rows.start : rows.stop].sum())
        if not _is_whole(path, (size, width)):
            raise KIND.damaged(path, "it is missing, or its shape does not fit")
        shards.append(_mapped(path, dtype))
    columns = None if width == d_model else np.arange(d_model)
    return States(positions, shards, columns=columns)


def _read_texts(folder: pathlib.Path, base: str) -> Generations:
    """The texts of a complete cache; raises a `UserError` if there are none."""
    with KIND.reading(folder / TEXTS):
        arrays = array_files.read_npz(
            folder / TEXTS, specs_of_texts(None), optional=("indices",)
        )
        if not fit_together(**arrays):
            raise ValueError("its texts do not fit their offsets")
    return Generations(folder, **arrays, base=base, vocab_size=0, facts={})
