"""Batches for a block drafter: pieces of texts with their states, and random anchors.

An epoch uses every position once as the state before an anchor. Positions of a text are
drawn in random order and cut into groups of A, the anchors of one row of a batch; rows
come in random order. The rest of a text that does not fill a group leaves anchors
empty. A text longer than a row is cut into spans, at other places in every epoch, and
the row of a group begins a window before its span, so that an anchor always sees its
whole window.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bpd_jax.errors import UserError
from bpd_jax.training.heads.cache import States
from bpd_jax.training.heads.positions import Positions


class BlockBatch(NamedTuple):
    """A batch for one step of a block drafter; a pytree of host arrays.

    Attributes:
      states: `[B, T, C]` of the frozen model, final hidden state first, in half
        precision; zeros past the end of the text.
      offsets: `[B]` int32, position in its text of the first of them.
      anchors: `[B, A]` int32, places of the certain tokens, counted from there; 1 where
        there is no anchor.
      tokens: `[B, A, L]` int32, y_0 … y_{L-1} of each anchor.
      valid: `[B, A, L]` bool, whether they lie in the text; all false without anchor.
    """

    states: np.ndarray
    offsets: np.ndarray
    anchors: np.ndarray
    tokens: np.ndarray
    valid: np.ndarray


class Groups(NamedTuple):
    """Anchors that share a row.

    Attributes:
      positions: `[G, A]`, which positions; -1 for none.
      starts: `[G]` int64, the first token of the row in its text.
    """

    positions: np.ndarray
    starts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class BlockSource:
    """Makes batches of anchors.

    Attributes:
      states: of every token of the texts but their last ones.
      positions: that anchors stand after.
      block_size: L.
      anchors: A, anchors of a row.
      rows: B, rows of a batch.
      window: tokens that a block sees; None for all.
      row_tokens: T, at most.
    """

    states: States
    positions: Positions
    block_size: int
    anchors: int
    rows: int
    window: int | None
    row_tokens: int

    def __post_init__(self) -> None:
        longest = self._lengths.max()
        if longest > self.row_tokens and (
            self.window is None or self.window >= self.row_tokens
        ):
            raise UserError(
                f"texts have up to {longest + 1} tokens, which is more than a row of "
                f"HeadsTrainConfig.row_tokens = {self.row_tokens}: raise it, or set "
                "BlockDrafterConfig.window to less."
            )

    @property
    def _lengths(self) -> np.ndarray:
        """Stored states of every text."""
        return np.diff(self.states.positions.starts)

    @property
    def length(self) -> int:
        """T, tokens of a row, the same for all batches."""
        return min(self.row_tokens, -(-int(self._lengths.max()) // 32) * 32)

    def epoch(self, indices: np.ndarray, rng: np.random.Generator) -> Groups:
        """All groups of an epoch, in random order."""
        rows = self.positions.rows[indices]
        # Tokens before the anchor, which is where it stands in its text.
        before = self._before(indices)
        span, starts = np.zeros_like(rows), np.zeros_like(rows)
        long = self._lengths[rows] > self.length
        if long.any():
            assert self.window is not None
            stride = self.length - self.window
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
        """Endless batches; an epoch drops less than a batch.

        Args:
          indices: positions to draw from.
          seed: of the order, which depends on nothing else.
          step: how many batches to leave out.
        """
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

    def measured(self, indices: np.ndarray) -> list[BlockBatch]:
        """All of some positions in batches of one size; the last is filled up."""
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
        """The batch of some groups."""
        picked, starts = groups.positions[part], groups.starts[part]
        present = picked >= 0
        indices = np.maximum(picked, 0)
        after = self.positions.after(indices.ravel(), self.block_size)
        shape = (*picked.shape, self.block_size)
        before = self._before(indices)
        anchors = np.where(present, before - starts[:, None], 1)
        # The first of a group is always there, except in rows that fill a batch up.
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
            after.tokens.reshape(shape),
            after.valid.reshape(shape) & present[..., None],
        )

    def _before(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of the text up to and including each position."""
        offsets = self.positions.offsets[self.positions.rows[indices]]
        return self.positions.places[indices] - offsets + 1
