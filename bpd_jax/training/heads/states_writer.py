"""Writes states while the texts are generated."""

import contextlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import Generations
from bpd_jax.storage import array_files
from bpd_jax.storage.paths import as_path
from bpd_jax.training.heads.frozen_states import check_finite, states_dtype
from bpd_jax.training.heads.states_cache import earlier_shards
from bpd_jax.training.heads.states_files import (
    KIND,
    TEXTS,
    cache_bytes,
    check_states,
    free_bytes,
    full_shard,
    mapped_states,
    save_states,
    shard_name,
)

# Ending of the name of a shard whose texts have not been written yet.
_PENDING = ".pending"


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

        Args:
          folder: folder of the cache, which is created with the first shard.
          header: its header; see `describe_states`.
          texts: the texts that exist already, or None.
        """
        self._folder, self._header = as_path(folder), header
        check_states(self._folder, header)
        if texts is not None:
            earlier_shards(self._folder, texts, header)
        elif (self._folder / TEXTS).exists():
            raise UserError(
                f"{self._folder} holds states of other texts: choose another folder, "
                "or remove this one."
            )
        self._width = header["d_model"] * (1 + len(header["layers"]))
        self._pending: list[pathlib.Path] = []
        self._outdated: list[pathlib.Path] = []
        self._number = 0
        self._texts: list[np.ndarray] = []
        self._prompt_lengths: list[int] = []
        # None for a text without states.
        self._states: list[np.ndarray | None] = []
        if texts is not None:
            for row, prompt_length in enumerate(texts.prompt_lengths.tolist()):
                self._append(texts[row], prompt_length, None)
        self._reopen()

    def describe_size(self, prompts: Sequence[np.ndarray], new_tokens: int) -> str:
        """One line: the space that states of the prompts' texts take, and what is free.

        Args:
          prompts: prompts of which texts will be generated.
          new_tokens: most tokens of a continuation.
        """
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

        Args:
          text: tokens of the prompt and of its continuation.
          prompt_length: number of tokens of the prompt.
          states: `[T, C]` states after the tokens of the text; that of the last one is
            not needed.
        """
        # A copy: `states` may have room for a longer text.
        kept = states[self._skipped(prompt_length) : len(text) - 1].copy()
        check_finite(kept)
        self._append(text, prompt_length, kept)

    def flush(self) -> None:
        """Completes the shards of all texts so far, which have been written."""
        for path in self._pending:
            # Another run in this folder may have removed it: training computes it.
            with contextlib.suppress(FileNotFoundError):
                path.replace(path.with_suffix(""))
        for path in self._outdated:
            path.unlink(missing_ok=True)
        self._pending.clear()
        self._outdated.clear()

    def close(self) -> None:
        """Writes the last shard, which is not full, after the last text."""
        if self._texts:
            self._write()
        self.flush()

    def _skipped(self, prompt_length: int) -> int:
        """Number of states at the beginning of a text that are not stored.

        See `position_counts`.
        """
        return 0 if self._header["include_prompts"] else max(prompt_length - 1, 0)

    @property
    def _sizes(self) -> list[int]:
        """Number of states of each text of the shard."""
        pairs = zip(self._texts, self._prompt_lengths, strict=True)
        return [len(text) - 1 - self._skipped(prompt) for text, prompt in pairs]

    def _append(
        self, text: np.ndarray, prompt_length: int, states: np.ndarray | None
    ) -> None:
        self._texts.append(text)
        self._prompt_lengths.append(prompt_length)
        self._states.append(states)
        if sum(self._sizes) >= full_shard(self._width):
            self._write()

    @property
    def _name(self) -> str:
        """Name of the shard."""
        lengths = [len(text) for text in self._texts]
        tokens = np.concatenate(self._texts)
        return shard_name(self._number, tokens, lengths, self._prompt_lengths)

    def _reopen(self) -> None:
        """Reads the last shard of an earlier run, which was not full."""
        for path in self._folder.glob(f"*{_PENDING}"):
            # The texts of this shard were not written.
            path.unlink(missing_ok=True)
        if not self._texts:
            return
        path, ends = self._folder / self._name, np.cumsum(self._sizes)
        try:
            shape = array_files.open_npy(path).shape
        except (OSError, ValueError):
            return
        if shape == (ends[-1], self._width):
            stored = np.array(mapped_states(path, states_dtype(self._header["dtype"])))
            self._states = list(np.split(stored, ends[:-1]))
            self._outdated.append(path)

    def _write(self) -> None:
        """Writes a shard until `flush`, unless some of its states are missing."""
        states = [part for part in self._states if part is not None]
        if len(states) == len(self._texts):
            path = self._folder / self._name
            if path in self._outdated:
                self._outdated.remove(path)  # Nothing was added to it.
            else:
                KIND.write_header(self._folder, self._header)
                self._pending.append(path.with_name(path.name + _PENDING))
                save_states(self._pending[-1], np.concatenate(states))
        self._number += 1
        self._texts, self._prompt_lengths, self._states = [], [], []
