"""Batches for a block drafter: spans of texts with their states, and random anchors.

An epoch uses every position once as the state before an anchor. The positions of a text
are shuffled and split into groups of A, the anchors of one row of a batch; the rows are
shuffled too. The last group of a text may have fewer anchors. A text longer than a row
is split into spans, at different points in every epoch, and the row of a group begins
one window before its span, so that every anchor sees its whole window, and ends `ahead`
tokens after it, for soft targets.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.training.heads.positions import Positions
from bpd_jax.training.heads.states_cache import States


class BlockBatch(NamedTuple):
    """A batch for one step of a block drafter; a pytree of host arrays.

    Attributes:
      states: `[B, T, C]` states of the frozen model, final hidden state first, in half
        precision; zeros past the end of the text.
      offsets: `[B]` int32, position of the row's first token in its text.
      anchors: `[B, A]` int32, positions of the certain tokens in the row; 1 for unused
        anchors.
      tokens: `[B, A, L]` int32, y_0 … y_{L-1} of each anchor.
      valid: `[B, A, L]` bool, whether they are in the text; false for unused anchors.
    """

    states: np.ndarray
    offsets: np.ndarray
    anchors: np.ndarray
    tokens: np.ndarray
    valid: np.ndarray


class Groups(NamedTuple):
    """Groups of anchors that share a row.

    Attributes:
      positions: `[G, A]`, indices of the positions; -1 for unused anchors.
      starts: `[G]` int64, position of the row's first token in its text.
    """

    positions: np.ndarray
    starts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class BlockBatcher:
    """Makes batches for a block drafter.

    Attributes:
      states: states of all tokens of the texts except the last token of each.
      anchors: A, anchors of a row.
      rows: B, rows of a batch.
      window: number of tokens that a block attends to; None for all.
      row_tokens: highest number of tokens of a row.
      ahead: number of states from an anchor on that a row holds too, as far as its text
        has them: those that the model predicts y_1, y_2, … from.
    """

    states: States
    positions: Positions
    block_size: int
    anchors: int
    rows: int
    window: int | None
    row_tokens: int
    ahead: int = 0

    def __post_init__(self) -> None:
        longest = self._lengths.max()
        most = self.row_tokens - self.ahead
        if longest > self.row_tokens and (self.window is None or self.window >= most):
            raise UserError(
                f"the longest text has {longest + 1} tokens, which exceeds "
                f"HeadsTrainConfig.row_tokens = {self.row_tokens}: raise row_tokens, "
                f"or set BlockDrafterConfig.window to less than {most}."
            )

    @property
    def _lengths(self) -> np.ndarray:
        """Number of stored states of every text."""
        return np.diff(self.states.positions.starts)

    @property
    def length(self) -> int:
        """T, tokens of a row, the same for all batches."""
        return min(self.row_tokens, -(-int(self._lengths.max()) // 32) * 32)

    def epoch(self, indices: np.ndarray, rng: np.random.Generator) -> Groups:
        """All groups of an epoch, in random order."""
        rows = self.positions.rows[indices]
        # The number of tokens before an anchor is its position in the text.
        before = self._before(indices)
        span, starts = np.zeros_like(rows), np.zeros_like(rows)
        long = self._lengths[rows] > self.length
        if long.any():
            assert self.window is not None
            stride = self.length - self.window - self.ahead
            shift = rng.integers(0, stride)
            span[long] = (before[long] - 1 + shift) // stride
            starts[long] = span[long] * stride - shift - self.window
            last = self._lengths[rows] - self.length
            starts = np.clip(starts, 0, np.maximum(last, 0))
        order = np.lexsort((rng.random(len(indices)), span, rows))
        # Rank of every position among those of its text and span.
        new = np.diff(rows[order], prepend=-1) != 0
        new |= np.diff(span[order], prepend=-1) != 0
        first = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
        rank = np.arange(len(order)) - first
        group = np.cumsum(rank % self.anchors == 0) - 1
        positions = np.full((group[-1] + 1, self.anchors), -1)
        positions[group, rank % self.anchors] = indices[order]
        group_starts = np.zeros(len(positions), np.int64)
        group_starts[group] = starts[order]
        shuffled = rng.permutation(len(positions))
        return Groups(positions[shuffled], group_starts[shuffled])

    def batches(
        self, indices: np.ndarray, seed: int, step: int = 0
    ) -> Iterator[BlockBatch]:
        """Endless batches from `step` on; an epoch drops an incomplete last one."""
        epoch = 0
        while True:
            groups = self.epoch(indices, np.random.default_rng((seed, 4, epoch)))
            size = min(self.rows, len(groups.starts))
            per_epoch = len(groups.starts) // size
            for number in range(per_epoch):
                if step:
                    step -= 1
                    continue
                yield self.batch(groups, slice(number * size, (number + 1) * size))
            epoch += 1

    def held_out(self, indices: np.ndarray) -> list[BlockBatch]:
        """Batches of equal size of the given positions; the last one is padded."""
        groups = self.epoch(indices, np.random.default_rng(0))
        size = min(self.rows, len(groups.starts))
        missing = -len(groups.starts) % size
        groups = Groups(
            np.pad(groups.positions, ((0, missing), (0, 0)), constant_values=-1),
            np.pad(groups.starts, (0, missing)),
        )
        return [
            self.batch(groups, slice(first, first + size))
            for first in range(0, len(groups.starts), size)
        ]

    def batch(self, groups: Groups, part: slice) -> BlockBatch:
        """The batch of a slice of the groups."""
        positions, starts = groups.positions[part], groups.starts[part]
        present = positions >= 0
        indices = np.maximum(positions, 0)
        tokens, valid = self.positions.after(indices.ravel(), self.block_size)
        shape = (*positions.shape, self.block_size)
        before = self._before(indices)
        anchors = np.where(present, before - starts[:, None], 1)
        # The first anchor of a group is always used, except in padding rows.
        rows = self.positions.rows[indices[:, 0]]
        stored, length = self.states.positions.starts, self.length
        states = np.zeros((len(rows), length, self.states.width), self.states.dtype)
        for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
            first = stored[row] + start
            last = min(first + length, stored[row + 1])
            states[number, : last - first] = self.states.read(np.arange(first, last))
        return BlockBatch(
            states,
            starts.astype(np.int32),
            anchors.astype(np.int32),
            tokens.reshape(shape),
            valid.reshape(shape) & present[..., None],
        )

    def _before(self, indices: np.ndarray) -> np.ndarray:
        """Number of tokens of the text up to and including each position."""
        offsets = self.positions.offsets[self.positions.rows[indices]]
        return self.positions.places[indices] - offsets + 1
