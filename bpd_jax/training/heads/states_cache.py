"""A cache of the frozen model's states on disk, shared by trainings of heads.

A folder contains `states.json`, which identifies the model, shards of states, which are
memory-mapped, and, when the states are complete, the texts in `texts.npz`. The name of
a shard contains the hash of its texts: a killed run resumes with the first missing
shard, and texts that are added later require only their own states to be computed.
`StatesWriter` writes the shards while the texts are generated; `cached_states` computes
those that are missing.
"""

import hashlib
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bpd_jax import array_files, files, folders, progress
from bpd_jax.artifacts import Artifact
from bpd_jax.buckets import as_path
from bpd_jax.data.generations import Generations, fit_together, specs_of_texts
from bpd_jax.errors import UserError
from bpd_jax.training.heads.frozen_states import (
    FrozenModel,
    check_finite,
    states_dtype,
)
from bpd_jax.training.heads.positions import (
    Positions,
    position_counts,
    positions_of,
)

# Name of the folder of cached states in a run folder.
STATES = "states"
HEADER, TEXTS = "states.json", "texts.npz"
KIND = Artifact(
    "cached states",
    HEADER,
    in_place=True,
    remedy="train heads with HeadsTrainConfig.mode = 'cache'",
)

# Ending of the name of a shard whose texts have not been written yet.
_PENDING = ".pending"

# Bytes of a shard, which is computed in memory.
_SHARD_BYTES = 2**26


class States:
    """The states of all positions, read from disk on demand."""

    def __init__(
        self,
        positions: Positions,
        shards: Sequence[np.ndarray],
        stored: np.ndarray | None = None,
        columns: np.ndarray | None = None,
    ) -> None:
        """Creates a view of stored states.

        Args:
          positions: positions whose states are read.
          shards: stored states, in order.
          stored: `[P]`, index of each position's state among the stored states; None if
            exactly the states of the positions are stored, in the same order.
          columns: columns of the stored states to read; None for all.
        """
        self.positions = positions
        self._shards = shards
        self._bounds = np.cumsum([0, *map(len, shards)])
        self._stored, self._columns = stored, columns
        assert self._bounds[-1] == len(positions) or stored is not None

    @property
    def width(self) -> int:
        """C, the width of a state."""
        width = self._shards[0].shape[1]
        return width if self._columns is None else len(self._columns)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the states."""
        return self._shards[0].dtype

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Reads the states `[n, C]` at the given positions."""
        if self._stored is not None:
            indices = self._stored[indices]
        states = np.empty((len(indices), self.width), self._shards[0].dtype)
        shard_of = np.searchsorted(self._bounds, indices, side="right") - 1
        for number in np.unique(shard_of):
            in_shard = shard_of == number
            rows = indices[in_shard] - self._bounds[number]
            # Ascending order reads neighbouring states on disk together.
            order = np.argsort(rows)
            part = self._shards[number][rows[order]]
            if self._columns is not None:
                part = part[:, self._columns]
            states[np.flatnonzero(in_shard)[order]] = part
        return states


def cache_bytes(positions: int, width: int) -> int:
    """Bytes of stored states, which are in half precision."""
    return 2 * positions * width


def cached_states(
    folder: str | os.PathLike[str],
    texts: Generations,
    base: FrozenModel,
    fingerprint: str,
    *,
    include_prompts: bool,
) -> States:
    """Computes missing states of texts and opens the cache.

    A cache with more layers, with the positions of prompts, or with products in float32
    instead of bfloat16 can be used as well.

    Args:
      folder: folder of the cache, which is created if it does not exist.
      texts: generated texts.
      base: frozen model with the required layers.
      fingerprint: fingerprint of the model.
      include_prompts: whether to include the positions in prompts.

    Raises:
      UserError: the folder holds states of another model, of other texts or of products
        in another precision, or the disk has too little free space.
    """
    folder = as_path(folder)
    layers = base.layers
    stored = _stored_header(folder)
    if stored and set(layers) <= set(stored["layers"]):
        base = base.with_layers(tuple(stored["layers"]))
    if stored.get("products") == "float32":
        base = base.with_products("float32")
    stores_prompts = include_prompts or stored.get("include_prompts", False)
    header = describe_states(
        fingerprint,
        base.d_model,
        base.layers,
        dtype=base.dtype.name,
        products=base.products,
        include_prompts=stores_prompts,
    )
    check_states(folder, header)
    earlier = _earlier_shards(folder, texts, header)
    counts = position_counts(texts.lengths, texts.prompt_lengths, stores_prompts)
    width = base.width
    shards = _shards(folder, texts, counts, width)
    missing = [shard for shard in shards if not shard.is_complete]
    total, needed = (sum(shard.shape[0] for shard in x) for x in (shards, missing))
    _check_space(folder, cache_bytes(needed, width))
    if missing:
        with progress.bar(
            label="base states",
            total=total,
            initial=total - needed,
            unit="position",
            unit_scale=True,
        ) as bar:
            for shard in missing:
                states = _compute(base, texts, shard.rows, counts, bar)
                KIND.write_header(folder, header)
                _save(shard.path, states)
    # Texts were added: a shard with more texts has replaced the earlier last shard.
    for path in earlier - {shard.path for shard in shards}:
        path.unlink(missing_ok=True)
    array_files.write_npz(
        folder / TEXTS,
        {
            "tokens": texts.tokens,
            "offsets": texts.offsets,
            "prompt_lengths": texts.prompt_lengths,
        },
    )
    arrays = [_mapped(shard.path, base.dtype) for shard in shards]
    positions = positions_of(texts, include_prompts)
    indices = _indices(positions, include_prompts, stores_prompts)
    return States(positions, arrays, indices, _columns(base, layers))


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
    folders.check_folder(folder, KIND)
    if (folder / HEADER).exists():
        _check_header(folder, header)


def _indices(positions: Positions, prompts: bool, stored: bool) -> np.ndarray | None:
    """Indices of the states of positions; see `stored` of `States`.

    Args:
      positions: the positions.
      prompts: whether they include those in prompts.
      stored: whether the stored states do.
    """
    if prompts == stored:
        return None
    # States of all tokens of a text but the last are stored.
    return positions.places - positions.rows


def _columns(base: FrozenModel, layers: tuple[int, ...]) -> np.ndarray | None:
    """Columns of the final hidden state and of some layers in the states of `base`."""
    if layers == base.layers:
        return None
    blocks = [0, *(1 + base.layers.index(layer) for layer in layers)]
    width = base.d_model
    return (np.array(blocks)[:, None] * width + np.arange(width)).ravel()


def _read_header(folder: pathlib.Path) -> dict[str, Any]:
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


def _stored_header(folder: pathlib.Path) -> dict[str, Any]:
    """The header of a cache; empty if there is none or it cannot be read."""
    try:
        return _read_header(folder)
    except UserError:
        return {}


def _check_header(folder: pathlib.Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Reads the header of a cache; raises a `UserError` if it has other values."""
    header = _read_header(folder)
    for name, value in expected.items():
        if header.get(name) != value:
            raise UserError(
                f"{folder} holds states with {name} = {header.get(name)!r}, and this "
                f"run needs {value!r}: choose another folder, or remove this one."
            )
    return header


def _earlier_shards(
    folder: pathlib.Path, texts: Generations, header: dict[str, Any]
) -> set[pathlib.Path]:
    """The shards of a complete cache, empty if it was never completed.

    Raises:
      UserError: the texts do not begin with those of the cache.
    """
    try:
        old = _read_texts(folder, header["base"])
    except UserError:
        # The cache was never completed. Shards of other texts have other names.
        return set()
    extends = all(
        np.array_equal(earlier, new[: len(earlier)])
        for earlier, new in (
            (old.tokens, texts.tokens),
            (old.offsets, texts.offsets),
            (old.prompt_lengths, texts.prompt_lengths),
        )
    )
    if not extends:
        raise UserError(
            f"{folder} holds states of other texts than those of {texts.folder}: "
            "choose another folder with HeadsTrainConfig.states, or remove this one."
        )
    counts = position_counts(old.lengths, old.prompt_lengths, header["include_prompts"])
    width = header["d_model"] * (1 + len(header["layers"]))
    return {shard.path for shard in _shards(folder, old, counts, width)}


class _Shard(NamedTuple):
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


def _shards(
    folder: pathlib.Path, texts: Generations, counts: np.ndarray, width: int
) -> list[_Shard]:
    """The shards of some texts, the full ones of which do not depend on later texts."""
    limit = _full_shard(width)
    shards: list[_Shard] = []
    first, size = 0, 0
    for row, count in enumerate(counts.tolist()):
        size += count
        if size and (size >= limit or row == len(counts) - 1):
            rows = range(first, row + 1)
            name = _shard_name(
                len(shards),
                texts.tokens[texts.offsets[first] : texts.offsets[row + 1]],
                texts.lengths[first : row + 1],
                texts.prompt_lengths[first : row + 1],
            )
            shards.append(_Shard(rows, folder / name, (size, width)))
            first, size = row + 1, 0
    return shards


def _full_shard(width: int) -> int:
    """Number of states from which on a shard is full."""
    return max(1, _SHARD_BYTES // (2 * width))


def _shard_name(
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


class StatesWriter:
    """Writes the states of texts in the order in which the texts are generated.

    Its shards are those of `cached_states`, which computes what is missing: the last
    shard, which is not full, and those with texts of which only the tokens are known.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        header: dict[str, Any],
        texts: Generations | None,
    ) -> None:
        """Continues a cache after the texts that exist already.

        Args:
          folder: folder of the cache, which is created if it does not exist.
          header: its header; see `describe_states`.
          texts: the texts that exist already, or None.

        Raises:
          UserError: the folder holds other files, or other states.
        """
        self._folder = as_path(folder)
        check_states(self._folder, header)
        KIND.write_header(self._folder, header)
        self._include_prompts = header["include_prompts"]
        self._width = header["d_model"] * (1 + len(header["layers"]))
        # Shards whose texts a killed run had not written.
        for path in self._folder.glob(f"*{_PENDING}"):
            path.unlink()
        self._pending: list[pathlib.Path] = []
        self._number = self._size = 0
        self._texts: list[np.ndarray] = []
        self._prompt_lengths: list[int] = []
        # None for a text without states.
        self._states: list[np.ndarray | None] = []
        if texts is not None:
            for row, prompt_length in enumerate(texts.prompt_lengths.tolist()):
                self._append(texts[row], prompt_length, None)

    def add(self, text: np.ndarray, prompt_length: int, states: np.ndarray) -> None:
        """Adds a text.

        Args:
          text: tokens of the prompt and of its continuation.
          prompt_length: number of tokens of the prompt.
          states: `[T, C]` states after the tokens of the text; that of the last one is
            not needed.

        Raises:
          UserError: a state is too large for the dtype, or the disk is full.
        """
        kept = states[self._skipped(prompt_length) : len(text) - 1]
        check_finite(kept)
        self._append(text, prompt_length, kept)

    def flush(self) -> None:
        """Completes the shards of all texts so far, which have been written."""
        for path in self._pending:
            path.replace(path.with_suffix(""))
        self._pending.clear()

    def _skipped(self, prompt_length: int) -> int:
        """Number of states at the beginning of a text that are not stored.

        See `position_counts`.
        """
        return 0 if self._include_prompts else max(prompt_length - 1, 0)

    def _append(
        self, text: np.ndarray, prompt_length: int, states: np.ndarray | None
    ) -> None:
        self._texts.append(text)
        self._prompt_lengths.append(prompt_length)
        self._states.append(states)
        self._size += len(text) - 1 - self._skipped(prompt_length)
        if self._size >= _full_shard(self._width):
            self._write()

    def _write(self) -> None:
        """Writes a full shard until `flush`, unless some of its states are missing."""
        states = [part for part in self._states if part is not None]
        if len(states) == len(self._texts):
            name = _shard_name(
                self._number,
                np.concatenate(self._texts),
                [len(text) for text in self._texts],
                self._prompt_lengths,
            )
            self._pending.append(self._folder / (name + _PENDING))
            _save(self._pending[-1], np.concatenate(states))
        self._number += 1
        self._texts, self._prompt_lengths, self._states = [], [], []
        self._size = 0


def _mapped(path: pathlib.Path, dtype: np.dtype) -> np.ndarray:
    # .npy files have no bfloat16, so both dtypes are stored as uint16 bit patterns.
    return array_files.open_npy(path).view(dtype)


def _check_space(folder: pathlib.Path, needed: int) -> None:
    nearest = next(
        p for p in (folder.absolute(), *folder.absolute().parents) if p.exists()
    )
    free = shutil.disk_usage(nearest).free
    if needed > free:
        raise UserError(
            f"the states take {needed / 1e9:.2f} GB and {nearest} has only "
            f"{free / 1e9:.2f} GB free: free space, choose another folder with "
            "HeadsTrainConfig.states, or set HeadsTrainConfig.mode = 'ring'."
        )


def _compute(
    base: FrozenModel,
    texts: Generations,
    rows: range,
    counts: np.ndarray,
    bar: progress.tqdm,
) -> np.ndarray:
    """Computes the states `[n, C]` of all positions of some texts."""
    starts = np.concatenate([[0], np.cumsum(counts[rows.start : rows.stop])])
    states = np.empty((starts[-1], base.width), base.dtype)
    for number, text_states in base.states([texts[row] for row in rows]):
        first, last = starts[number], starts[number + 1]
        # The last token of a text is not a position: no token follows it.
        states[first:last] = text_states[len(text_states) - 1 - (last - first) : -1]
        bar.update(last - first)
    return states


def _save(path: pathlib.Path, states: np.ndarray) -> None:
    with files.replacing_file(path) as temporary, temporary.open("wb") as stream:
        np.save(stream, states.view(np.uint16))


def open_states(folder: str | os.PathLike[str], fingerprint: str) -> States:
    """Opens the final hidden states of a complete cache, without the generated texts.

    Positions in prompts, whose tokens are not the model's own, are left out.

    Raises:
      UserError: the cache is missing, incomplete, or of another model.
    """
    folder = as_path(folder)
    header = _check_header(folder, {"base": fingerprint})
    dtype, d_model = states_dtype(header["dtype"]), header["d_model"]
    width = d_model * (1 + len(header["layers"]))
    texts = _read_texts(folder, fingerprint)
    stored = header["include_prompts"]
    counts = position_counts(texts.lengths, texts.prompt_lengths, stored)
    shards = _shards(folder, texts, counts, width)
    for shard in shards:
        if not shard.is_complete:
            raise KIND.damaged(shard.path, "it is missing or has another shape")
    arrays = [_mapped(shard.path, dtype) for shard in shards]
    columns = None if width == d_model else np.arange(d_model)
    positions = positions_of(texts, include_prompts=False)
    return States(positions, arrays, _indices(positions, False, stored), columns)


def _read_texts(folder: pathlib.Path, base: str) -> Generations:
    """Reads the texts of a complete cache; raises a `UserError` if there are none."""
    with KIND.reading(folder / TEXTS):
        arrays = array_files.read_npz(
            folder / TEXTS, specs_of_texts(None), optional=("indices",)
        )
        if not fit_together(**arrays):
            raise ValueError("its texts do not match their offsets")
    return Generations(folder, **arrays, base=base, vocab_size=0, facts={})
