"""Writes states while the texts are generated."""

import os
import pathlib
from typing import Any

import numpy as np

from bpd_jax.buckets import as_path
from bpd_jax.data.generations import Generations
from bpd_jax.training.heads.frozen_states import check_finite
from bpd_jax.training.heads.states_files import (
    KIND,
    check_states,
    full_shard,
    save_states,
    shard_name,
)

# Ending of the name of a shard whose texts have not been written yet.
_PENDING = ".pending"


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
        if self._size >= full_shard(self._width):
            self._write()

    def _write(self) -> None:
        """Writes a full shard until `flush`, unless some of its states are missing."""
        states = [part for part in self._states if part is not None]
        if len(states) == len(self._texts):
            name = shard_name(
                self._number,
                np.concatenate(self._texts),
                [len(text) for text in self._texts],
                self._prompt_lengths,
            )
            self._pending.append(self._folder / (name + _PENDING))
            save_states(self._pending[-1], np.concatenate(states))
        self._number += 1
        self._texts, self._prompt_lengths, self._states = [], [], []
        self._size = 0
