"""A cache of the frozen model's states on disk, shared by trainings of heads.

A killed run resumes with the first missing shard, and texts that are added later
require only their own states to be computed. `StatesWriter` writes shards while the
texts are generated; `cached_states` computes those that are missing. `states_files`
describes the files.
"""

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import Generations
from bpd_jax.models.transformer_config import INT8
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path
from bpd_jax.training.heads.frozen_states import FrozenModel, states_dtype
from bpd_jax.training.heads.positions import (
    Positions,
    position_counts,
    positions_of,
)
from bpd_jax.training.heads.states_files import (
    KIND,
    TEXTS,
    cache_bytes,
    check_extends,
    check_header,
    check_states,
    describe_states,
    free_bytes,
    mapped_states,
    read_texts,
    remove_others,
    save_states,
    shards_of,
    stored_header,
)

# Name of the folder of cached states in a run folder.
STATES = "states"


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
        width = self._shards[0].shape[1]
        return width if self._columns is None else len(self._columns)

    @property
    def dtype(self) -> np.dtype:
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


def cached_states(
    folder: str | os.PathLike[str],
    texts: Generations,
    base: FrozenModel,
    fingerprint: str,
    *,
    include_prompts: bool,
) -> States:
    """Computes missing states of texts and opens the cache.

    A cache with more layers, with the positions of prompts, of another dtype, or with
    products in float32 or int8 instead of bfloat16 can be used as well.
    """
    folder = as_path(folder)
    layers = base.layers
    stored = stored_header(folder)
    products = base.products
    if stored:
        more = set(layers) <= set(stored["layers"])
        exact = stored.get("products") == "float32"
        if exact or (products == "bfloat16" and stored.get("products") == INT8):
            products = stored["products"]
        base = base.with_states(
            stored["dtype"],
            tuple(stored["layers"]) if more else layers,
            "float32" if exact else base.products,
        )
    stores_prompts = include_prompts or stored.get("include_prompts", False)
    header = describe_states(
        fingerprint,
        base.d_model,
        base.layers,
        dtype=base.dtype.name,
        products=products,
        include_prompts=stores_prompts,
    )
    check_states(folder, header)
    was_complete = check_extends(folder, texts, fingerprint)
    counts = position_counts(texts.lengths, texts.prompt_lengths, stores_prompts)
    width = base.width
    shards = shards_of(folder, texts, counts, width)
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
                save_states(shard.path, states)
    if was_complete:
        # A shard with more texts has replaced the earlier last shard.
        remove_others(folder, [shard.path.name for shard in shards])
    files.write_npz(
        folder / TEXTS,
        {
            "tokens": texts.tokens,
            "offsets": texts.offsets,
            "prompt_lengths": texts.prompt_lengths,
        },
    )
    arrays = [mapped_states(shard.path, base.dtype) for shard in shards]
    positions = positions_of(texts, include_prompts)
    indices = _indices(positions, include_prompts, stores_prompts)
    return States(positions, arrays, indices, _columns(base, layers))


def _indices(positions: Positions, prompts: bool, stored: bool) -> np.ndarray | None:
    """Indices of the states of positions; see `stored` of `States`.

    `prompts` says whether the positions include those in prompts, `stored` whether the
    stored states do.
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


def _check_space(folder: pathlib.Path, needed: int) -> None:
    free, nearest = free_bytes(folder)
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
    starts = np.concatenate([[0], np.cumsum(counts[rows.start : rows.stop])])
    states = np.empty((starts[-1], base.width), base.dtype)
    for number, text_states in base.states([texts[row] for row in rows]):
        first, last = starts[number], starts[number + 1]
        # The last token of a text is not a position: no token follows it.
        states[first:last] = text_states[len(text_states) - 1 - (last - first) : -1]
        bar.update(last - first)
    return states


def open_states(folder: str | os.PathLike[str], fingerprint: str) -> States:
    """Opens the final hidden states of a complete cache, without the generated texts.

    Positions in prompts, whose tokens are not the model's own, are left out.
    """
    folder = as_path(folder)
    header = check_header(folder, {"base": fingerprint})
    dtype, d_model = states_dtype(header["dtype"]), header["d_model"]
    width = d_model * (1 + len(header["layers"]))
    texts = read_texts(folder, fingerprint)
    stored = header["include_prompts"]
    counts = position_counts(texts.lengths, texts.prompt_lengths, stored)
    shards = shards_of(folder, texts, counts, width)
    for shard in shards:
        with KIND.reading(shard.path):
            if not shard.is_complete:
                raise ValueError("it is missing or has another shape")
    arrays = [mapped_states(shard.path, dtype) for shard in shards]
    columns = None if width == d_model else np.arange(d_model)
    positions = positions_of(texts, include_prompts=False)
    return States(positions, arrays, _indices(positions, False, stored), columns)
