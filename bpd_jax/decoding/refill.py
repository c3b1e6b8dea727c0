"""Continuous batching: finished rows of a batch are refilled with further prompts.

A batch takes as many serial calls as its longest text. With continuous batching (Yu et
al. 2022, "Orca"), the next prompt takes the place of a finished text: prompts are
prefilled in small groups, whose rows are written into the state of the batch.

Every row has slots for its prompt, padded to one of a few lengths, and for the new
tokens, and every pass attends to all of them. Prompts are therefore decoded in rounds,
sorted by padded length within a round. The slots grow with the prompts, and the batch
is drained at the end of each round.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bpd_jax.base.compiled import padded_length
from bpd_jax.base.typing import Array, Int, PyTree
from bpd_jax.decoding.decode_state import DecodeState, spread
from bpd_jax.decoding.generate import Task, check_prompts
from bpd_jax.models.cache import grow
from bpd_jax.models.partitioning import on_host

# The shortest length that prompts are padded to.
_SHORTEST = 64

# A batch is refilled in groups of 1/16 of its rows: rows of small groups wait less,
# prefills of large groups are more efficient.
_GROUPS = 16

# Number of prompts of a round, at whose end the batch is drained.
ROUND = 1024


def refill_length(length: int) -> int:
    """The length that a prompt of `length` tokens is padded to: few different ones."""
    return padded_length(length, per_octave=2, shortest=_SHORTEST)


def rounds_of(
    prompts: Sequence[np.ndarray], indices: Iterable[int], size: int = ROUND
) -> Iterator[list[int]]:
    """Splits indices, in their order, into rounds that are sorted by padded length."""
    remaining = iter(indices)
    while batch := list(itertools.islice(remaining, size)):
        yield sorted(batch, key=lambda index: refill_length(len(prompts[index])))


class Refilled(NamedTuple):
    """A finished text.

    Attributes:
      prompt: index of its prompt.
      tokens: tokens of the prompt and of its continuation.
      memory: its row of the drafter's memory, or None.
    """

    prompt: int
    tokens: np.ndarray
    memory: PyTree


def decode_refilled(
    task: Task,
    prompts: Sequence[np.ndarray],
    indices: Sequence[int],
    *,
    round_size: int = ROUND,
) -> Iterator[Refilled]:
    """Decodes prompts with continuous batching and yields texts as they finish.

    Args:
      task: model, method and options; the method must not need a reference.
      prompts: token ids of all prompts, each `[T]`.
      indices: indices of the prompts to decode, in order. The random numbers of a row
        depend on the index of its prompt: texts equal those of `Decoder.decode` for all
        prompts, up to rounding differences between batch shapes.
    """
    check_prompts(task.model, [prompts[index] for index in indices], task.options)
    for round_indices in rounds_of(prompts, indices, round_size):
        yield from _Batch(task, prompts).decode(round_indices)


class _Batch:
    """The batch of one round: the prompt of every row, and the state on the device."""

    def __init__(self, task: Task, prompts: Sequence[np.ndarray]) -> None:
        self.task, self.prompts = task, prompts
        self.rows = task.rows(task.options.batch_size)
        self.group = task.rows(max(self.rows // _GROUPS, 1))
        self.padded = 0
        self.state: DecodeState | None = None
        # The index of the prompt of each row; -1 for a free row.
        self.row_prompts = np.full(self.rows, -1)

    def decode(self, indices: Sequence[int]) -> Iterator[Refilled]:
        """Decodes prompts that are sorted by padded length."""
        begin, new_tokens = 0, self.task.options.max_new_tokens
        while begin < len(indices) or (self.row_prompts >= 0).any():
            free = np.flatnonzero(self.row_prompts < 0)
            if begin < len(indices) and len(free) >= self.group:
                padded = refill_length(len(self.prompts[indices[begin]]))
                group = [
                    index
                    for index in indices[begin : begin + self.group]
                    if refill_length(len(self.prompts[index])) == padded
                ]
                fresh = self.task.prefill(
                    self.prompts, group, self.group, new_tokens, padded, record=False
                )
                if self.state is not None and padded > self.padded:
                    if _row_shapes(fresh.memory) == _row_shapes(self.state.memory):
                        self.state = _grow(self.state, padded - self.padded)
                    else:
                        # The memory of a drafter cannot be resized.
                        yield from self._run(self.rows)
                        self.state = None
                self.padded = padded
                self._fill(np.flatnonzero(self.row_prompts < 0), fresh, group)
                begin += len(group)
            else:
                last = begin == len(indices)
                yield from self._run(self.rows if last else len(free) + self.group)

    def _fill(self, free: np.ndarray, fresh: DecodeState, indices: list[int]) -> None:
        """Writes the state of a group of prompts into free rows."""
        if self.state is None:
            self.state = _empty(fresh, self.rows, self.task.mesh)
        rows = free[: len(indices)]
        # Padding rows of the group have a target out of range and are dropped.
        targets = np.full(self.group, self.rows, np.int32)
        targets[: len(rows)] = rows
        self.state = _merge(self.state, fresh, jnp.asarray(targets), self.task.mesh)
        self.row_prompts[rows] = indices

    def _run(self, done_rows: int) -> Iterator[Refilled]:
        """Decodes until `done_rows` rows are done; yields and frees them."""
        assert self.state is not None
        self.state = self.task.run(self.state, done_rows=min(done_rows, self.rows))
        done, lengths, tokens = on_host(
            (self.state.done, self.state.lengths, self.state.tokens)
        )
        finished = np.flatnonzero(done & (self.row_prompts >= 0))
        for row in finished:
            text = tokens[row, : lengths[row]].copy()
            memory = _row(self.state.memory, row)
            yield Refilled(int(self.row_prompts[row]), text, memory)
        self.row_prompts[finished] = -1


def _row_shapes(memory: PyTree) -> list[tuple[int, ...]]:
    """The shapes of a row of the drafter's memory."""
    return [leaf.shape[1:] for leaf in jax.tree.leaves(memory)]


@jax.jit
def _row(memory: PyTree, row: Int[Array, ""]) -> PyTree:
    """One row of the drafter's memory."""
    return jax.tree.map(lambda leaf: leaf[row], memory)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="state")
def _merge(
    state: DecodeState, fresh: DecodeState, rows: Int[Array, " G"], mesh: Mesh | None
) -> DecodeState:
    """Replaces `rows` of a state by those of `fresh`; rows out of range are dropped."""
    merged = jax.tree.map(
        lambda old, new: old.at[rows].set(new, mode="drop"), state, fresh
    )
    return spread(merged, mesh)


@functools.partial(jax.jit, static_argnames=("rows", "mesh"))
def _empty(fresh: DecodeState, rows: int, mesh: Mesh | None) -> DecodeState:
    """A state of `rows` rows, all of them done, with the shapes of `fresh`."""
    copies = jax.tree.map(lambda leaf: leaf[jnp.zeros(rows, jnp.int32)], fresh)
    return spread(dataclasses.replace(copies, done=jnp.ones(rows, bool)), mesh)


@functools.partial(jax.jit, static_argnames="slots")
def _grow(state: DecodeState, slots: int) -> DecodeState:
    """The same texts with `slots` more slots per row."""
    tokens = jnp.pad(state.tokens, [(0, 0), (0, slots)])
    return dataclasses.replace(state, tokens=tokens, cache=grow(state.cache, slots))
