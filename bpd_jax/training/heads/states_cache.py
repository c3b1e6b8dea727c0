"""A cache of the frozen model's states on disk, shared by trainings of heads.

A killed run resumes with the first missing block, and texts that are added later
require only their own states to be computed. `StatesWriter` writes states while the
texts are generated; `cached_states` computes those that are missing. `states_files`
describes the files.
"""

import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import Generations
from bpd_jax.models.transformer_config import INT8
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path
from bpd_jax.training.heads.frozen_states import FrozenModel
from bpd_jax.training.heads.positions import (
    Positions,
    position_counts,
    positions_of,
)
from bpd_jax.training.heads.states_files import (
    TEXTS,
    About,
    StatesFile,
    cache_bytes,
    free_bytes,
    read_texts,
    stored_about,
)

# Name of the folder of cached states in a run folder.
STATES = "states"


class States:
    """The states of all positions, read from disk on demand."""

    def __init__(
        self,
        positions: Positions,
        array: np.ndarray,
        stored: np.ndarray | None = None,
        columns: np.ndarray | None = None,
    ) -> None:
        """Creates a view of stored states.

        Args:
          array: the stored states `[N, C]`, memory-mapped.
          stored: `[P]`, index of each position's state among the stored states; None if
            exactly the states of the positions are stored, in the same order.
          columns: columns of the stored states to read; None for all.
        """
        self.positions = positions
        self._array, self._stored, self._columns = array, stored, columns
        assert len(array) == len(positions) or stored is not None

    @property
    def width(self) -> int:
        return self._array.shape[1] if self._columns is None else len(self._columns)

    @property
    def dtype(self) -> np.dtype:
        return self._array.dtype

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Reads the states `[n, C]` at the given positions."""
        if self._stored is not None:
            indices = self._stored[indices]
        states = np.empty((len(indices), self.width), self.dtype)
        # Ascending order reads neighbouring states on disk together.
        order = np.argsort(indices)
        rows = self._array[indices[order]]
        states[order] = rows if self._columns is None else rows[:, self._columns]
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
    stored, products = stored_about(folder), base.products
    stores_prompts = include_prompts
    if stored is not None:
        exact = stored.products == "float32"
        if exact or (products == "bfloat16" and stored.products == INT8):
            products = stored.products
        base = base.with_states(
            stored.dtype,
            stored.layers if set(layers) <= set(stored.layers) else layers,
            "float32" if exact else base.products,
        )
        stores_prompts = include_prompts or stored.include_prompts
    about = About(
        fingerprint,
        base.d_model,
        base.layers,
        base.dtype.name,
        products,
        stores_prompts,
    )
    file = StatesFile(folder, about)
    file.check_begins(texts)
    counts = position_counts(texts.lengths, texts.prompt_lengths, stores_prompts)
    done = file.texts
    needed = int(counts[done:].sum())
    _check_space(folder, cache_bytes(needed, file.width))
    if done < len(texts):
        with progress.bar(
            label="base states",
            total=int(counts.sum()),
            initial=int(counts.sum()) - needed,
            unit="position",
            unit_scale=True,
        ) as bar:
            for rows in _blocks(counts, done, file.full_block):
                some = [texts[row] for row in rows]
                states = _compute(base, some, counts[rows.start : rows.stop], bar)
                lengths = texts.prompt_lengths[rows.start : rows.stop]
                file.append(some, lengths, states)
    files.write_npz(
        folder / TEXTS,
        {
            "tokens": texts.tokens,
            "offsets": texts.offsets,
            "prompt_lengths": texts.prompt_lengths,
        },
    )
    positions = positions_of(texts, include_prompts)
    indices = _indices(positions, include_prompts, stores_prompts)
    return States(positions, file.array(), indices, _columns(base, layers))


def _blocks(counts: np.ndarray, first: int, full: int) -> Iterator[range]:
    """The texts from `first` on, in blocks of at least `full` states but the last."""
    size = 0
    for row in range(first, len(counts)):
        size += int(counts[row])
        if size >= full or row == len(counts) - 1:
            yield range(first, row + 1)
            first, size = row + 1, 0


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
    texts: Sequence[np.ndarray],
    counts: np.ndarray,
    bar: progress.tqdm,
) -> np.ndarray:
    starts = np.concatenate([[0], np.cumsum(counts)])
    states = np.empty((starts[-1], base.width), base.dtype)
    for number, text_states in base.states(texts):
        first, last = starts[number], starts[number + 1]
        # The last token of a text is not a position: no token follows it.
        states[first:last] = text_states[len(text_states) - 1 - (last - first) : -1]
        bar.update(last - first)
    return states


def open_states(folder: str | os.PathLike[str], fingerprint: str) -> States:
    """Opens the final hidden states of a complete cache, without the generated texts.

    Positions in prompts, whose tokens are not the model's own, are left out.
    """
    file = StatesFile(folder)
    file.check(base=fingerprint)
    texts = read_texts(file.folder, fingerprint)
    file.check_begins(texts)
    d_model, stored = file.about.d_model, file.about.include_prompts
    counts = position_counts(texts.lengths, texts.prompt_lengths, stored)
    array = file.array()
    if len(array) != counts.sum():
        raise UserError(
            f"{file.folder} lacks states of some of its texts: train heads with "
            "HeadsTrainConfig.mode = 'cache'."
        )
    columns = None if file.width == d_model else np.arange(d_model)
    positions = positions_of(texts, include_prompts=False)
    return States(positions, array, _indices(positions, False, stored), columns)
