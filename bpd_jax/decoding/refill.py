"""Decoding many prompts through one batch whose rows are refilled as they finish.

A batch of prompts takes as many serial calls as its longest text. Here a finished row
is given the next prompt instead (continuous batching, Yu et al. 2022, "Orca"): prompts
are prefilled in small groups and their rows written into the state of the batch.

A row has room for its prompt, padded to one of a few sizes, and the new tokens, and
every pass attends over all of it. Prompts are therefore taken in rounds, and within a
round by size; the batch grows with them, so that it runs empty once a round.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.generate import Task, check_prompts
from bpd_jax.decoding.state import DecodeState
from bpd_jax.models.cache import grow
from bpd_jax.typing import Array, Int

# Prompts are padded to one of these, each half as long again as the one before: few
# shapes are compiled, and few tokens are wasted.
_SHORTEST, _STEP = 64, 32

# Rows that are refilled together, of a batch: fewer wait less, more are prefilled
# faster.
_GROUPS = 16

# Prompts of a round: at its end the batch runs empty.
ROUND = 1024


def padded_length(length: int) -> int:
    """The least padding that holds `length` tokens.

    >>> [padded_length(n) for n in (1, 64, 65, 97, 150, 1000)]
    [64, 64, 96, 160, 160, 1312]
    """
    size = _SHORTEST
    while size < length:
        size = math.floor(size * 1.5 / _STEP + 0.5) * _STEP
    return size


def rounds_of(
    prompts: Sequence[np.ndarray], indices: Iterable[int], size: int = ROUND
) -> Iterator[list[int]]:
    """Splits indices, in their order, into rounds that are sorted by padded length."""
    waiting = iter(indices)
    while chosen := list(itertools.islice(waiting, size)):
        yield sorted(chosen, key=lambda index: padded_length(len(prompts[index])))


def decode_refilled(
    task: Task,
    prompts: Sequence[np.ndarray],
    indices: Sequence[int],
    *,
    round_size: int = ROUND,
) -> Iterator[tuple[int, np.ndarray]]:
    """Decodes prompts, and yields each text as soon as it is finished.

    Args:
      task: model, method and options; the method must know no reference.
      prompts: token ids of all, each `[T]`.
      indices: of those to decode, in the order in which they begin. They choose the
        noise of sampling: a text is what `Decoder.decode` makes of the prompt among
        all, up to the rounding of other batch shapes.
      round_size: prompts of a round.

    Yields:
      The index of a prompt, and its tokens with those that were decoded after it.

    Raises:
      UserError: a prompt is empty or leaves no room for `max_new_tokens`.
    """
    check_prompts(task.model, [prompts[index] for index in indices], task.options)
    for chosen in rounds_of(prompts, indices, round_size):
        yield from _Batch(task, prompts).decode(chosen)


class _Batch:
    """One round: rows, the prompts they hold, and the state on the device."""

    def __init__(self, task: Task, prompts: Sequence[np.ndarray]) -> None:
        self.task, self.prompts = task, prompts
        self.rows = task.options.batch_size
        self.group = max(self.rows // _GROUPS, 1)
        self.padded = 0
        self.state: DecodeState | None = None
        # The prompt of each row; -1 for none.
        self.held = np.full(self.rows, -1)

    def decode(self, indices: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Decodes prompts that are sorted by padded length."""
        begin = 0
        while begin < len(indices) or (self.held >= 0).any():
            free = np.flatnonzero(self.held < 0)
            if begin < len(indices) and len(free) >= self.group:
                padded = padded_length(len(self.prompts[indices[begin]]))
                if padded > self.padded:
                    if self.state is not None and self.state.memory is not None:
                        # What a drafter remembers may have a size of its own.
                        yield from self._run(self.rows)
                        self.state = None
                    self._widen(padded)
                    free = np.flatnonzero(self.held < 0)
                group = [
                    index
                    for index in indices[begin : begin + self.group]
                    if padded_length(len(self.prompts[index])) == padded
                ]
                self._fill(free[: len(group)], group, padded)
                begin += len(group)
            else:
                last = begin == len(indices)
                yield from self._run(self.rows if last else len(free) + self.group)

    def _widen(self, padded: int) -> None:
        """Makes room for longer prompts."""
        if self.state is not None:
            self.state = _grow(self.state, padded - self.padded)
        self.padded = padded

    def _fill(self, rows: np.ndarray, indices: list[int], padded: int) -> None:
        """Gives prompts to free rows."""
        fresh = self.task.prefill(
            self.prompts,
            indices,
            self.group,
            self.task.options.max_new_tokens,
            padded,
            record=False,
        )
        if self.state is None:
            self.state = _empty(fresh, self.rows)
        # What only fills up the group is written nowhere.
        places = np.full(self.group, self.rows, np.int32)
        places[: len(rows)] = rows
        self.state = _merge(self.state, fresh, jnp.asarray(places))
        self.held[rows] = indices

    def _run(self, enough: int) -> Iterator[tuple[int, np.ndarray]]:
        """Decodes until so many rows are done; empties and yields those that are."""
        assert self.state is not None
        self.state = self.task.run(self.state, enough=min(enough, self.rows))
        done, lengths = jax.device_get((self.state.done, self.state.lengths))
        finished = np.flatnonzero(done & (self.held >= 0))
        tokens = np.asarray(self.state.tokens)
        for row in finished:
            yield int(self.held[row]), tokens[row, : lengths[row]].copy()
        self.held[finished] = -1


@functools.partial(jax.jit, donate_argnames="state")
def _merge(
    state: DecodeState, fresh: DecodeState, rows: Int[Array, " G"]
) -> DecodeState:
    """Writes the rows of another state over `rows`; those out of range are dropped."""
    return jax.tree.map(
        lambda old, new: old.at[rows].set(new, mode="drop"), state, fresh
    )


@functools.partial(jax.jit, static_argnames="rows")
def _empty(fresh: DecodeState, rows: int) -> DecodeState:
    """A state of the same shapes with so many rows, none of which runs."""
    copies = jax.tree.map(lambda leaf: leaf[jnp.zeros(rows, jnp.int32)], fresh)
    return dataclasses.replace(copies, done=jnp.ones(rows, bool))


@functools.partial(jax.jit, static_argnames="slots")
def _grow(state: DecodeState, slots: int) -> DecodeState:
    """The same texts with more room."""
    tokens = jnp.pad(state.tokens, [(0, 0), (0, slots)])
    return dataclasses.replace(state, tokens=tokens, cache=grow(state.cache, slots))
