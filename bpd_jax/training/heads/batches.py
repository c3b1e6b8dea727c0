"""Batches of positions with their states, from a cache on disk or a ring in memory."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bpd_jax.data.generations import Generations
from bpd_jax.training.heads.frozen_states import FrozenModel
from bpd_jax.training.heads.positions import Positions, epoch_order
from bpd_jax.training.heads.states_cache import States


class PositionBatch(NamedTuple):
    """Positions of one training step; a pytree of host arrays.

    Attributes:
      states: `[n, C]` states of the frozen model, in half precision.
      tokens: `[n, L]` int32, y_0 … y_{L-1}, the tokens after each position.
      valid: `[n, L]` bool, whether they are in the text.
      later: `[n, L-1, C]` states after y_0 … y_{L-2}, from which the model itself
        predicts y_1 … y_{L-1}, arbitrary where not valid; None if they are not needed.
    """

    states: np.ndarray
    tokens: np.ndarray
    valid: np.ndarray
    later: np.ndarray | None = None


def with_targets(
    positions: Positions, indices: np.ndarray, states: np.ndarray, block_size: int
) -> PositionBatch:
    return PositionBatch(states, *positions.after(indices, block_size))


@dataclasses.dataclass(frozen=True, eq=False)
class PositionBatcher:
    """Makes batches of independent positions from a cache."""

    states: States
    size: int
    block_size: int
    later: bool = False

    def batches(
        self, indices: np.ndarray, seed: int, step: int = 0
    ) -> Iterator[PositionBatch]:
        """Endless batches from `step` on; an epoch drops an incomplete last one."""
        states, size = self.states, min(self.size, len(indices))
        per_epoch = len(indices) // size
        epoch, step = divmod(step, per_epoch)
        while True:
            order = epoch_order(len(indices), seed, epoch)
            for number in range(step, per_epoch):
                drawn = indices[order[number * size : (number + 1) * size]]
                batch = with_targets(
                    states.positions, drawn, states.read(drawn), self.block_size
                )
                if self.later:
                    batch = batch._replace(later=_later(states, drawn, self.block_size))
                yield batch
            epoch, step = epoch + 1, 0

    def held_out(self, indices: np.ndarray) -> list[PositionBatch]:
        """Batches of equal size of the given positions; the last one is padded."""
        states = self.states.read(indices)
        return split_evenly(
            with_targets(self.states.positions, indices, states, self.block_size),
            self.size,
        )


def split_evenly(batch: PositionBatch, most: int) -> list[PositionBatch]:
    """Batches of equal size, `most` at most; the last one is padded."""
    count = len(batch.tokens)
    size = min(most, count)
    return [
        PositionBatch(
            *(
                np.pad(x[k : k + size], ((0, max(0, k + size - count)), (0, 0)))
                for x in batch[:3]
            )
        )
        for k in range(0, count, size)
    ]


def _later(states: States, indices: np.ndarray, block_size: int) -> np.ndarray:
    """`[n, L-1, C]`: the states at the next L-1 positions; see `PositionBatch`."""
    after = indices[:, None] + np.arange(1, block_size)
    # Past the end of a text these are states of the next text, but without a target.
    after = np.minimum(after, len(states.positions) - 1)
    return states.read(after.ravel()).reshape(*after.shape, -1)


class Ring:
    """A ring buffer of the states of the positions that were read last.

    It is for texts whose states would not fit on a disk. It takes C × 2 + 8 bytes of
    memory for each of `capacity` states.
    """

    def __init__(
        self,
        texts: Generations,
        positions: Positions,
        rows: np.ndarray,
        base: FrozenModel,
        *,
        capacity: int,
        group: int,
        seed: int,
    ) -> None:
        """Reads texts until the ring is full.

        Args:
          rows: indices of the texts to read, repeatedly and in a new order every time.
          capacity: number of states, at most that of the positions in `rows`.
          group: texts that are read at a time.
        """
        counts = np.diff(positions.starts)
        capacity = min(capacity, int(counts[rows].sum()))
        self._texts, self._positions, self._base = texts, positions, base
        self._counts, self._group = counts, group
        self._rng = np.random.default_rng((seed, 3))
        self._rows = self._endless(rows)
        self._states = np.empty((capacity, base.width), base.dtype)
        self._indices = np.empty(capacity, np.int64)
        self._next = 0
        self.added = 0
        self.add(capacity)

    def add(self, count: int) -> None:
        """Reads texts until at least `count` new states have replaced the oldest."""
        goal = self.added + count
        while self.added < goal:
            rows = [next(self._rows) for _ in range(self._group)]
            for number, states in self._base.states([self._texts[row] for row in rows]):
                row = rows[number]
                kept = states[len(states) - 1 - self._counts[row] : -1]
                self._put(self._positions.starts[row], kept)

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers `[n]` and states `[n, D]` of random positions in the ring."""
        slots = self._rng.integers(0, len(self._indices), count)
        return self._indices[slots], self._states[slots]

    def _put(self, first: int, states: np.ndarray) -> None:
        self.added += len(states)
        # If a text is longer than the ring, only its end is stored.
        first += max(0, len(states) - len(self._indices))
        states = states[-len(self._indices) :]
        places = (self._next + np.arange(len(states))) % len(self._indices)
        self._states[places] = states
        self._indices[places] = first + np.arange(len(states))
        self._next = (self._next + len(states)) % len(self._indices)

    def _endless(self, rows: np.ndarray) -> Iterator[int]:
        while True:
            yield from self._rng.permutation(rows).tolist()


def ring_batches(
    ring: Ring, positions: Positions, size: int, block_size: int, uses: float
) -> Iterator[PositionBatch]:
    """Endless batches from a ring, whose states are drawn `uses` times on average."""
    due = 0.0  # states to add
    while True:
        yield with_targets(positions, *ring.draw(size), block_size)
        due += size / uses
        if due >= 1:
            before = ring.added
            ring.add(int(due))
            # The ring reads groups of texts, which may add more states than were due.
            due -= ring.added - before


def held_out_states(
    texts: Generations, positions: Positions, indices: np.ndarray, base: FrozenModel
) -> np.ndarray:
    """`[n, C]`: states at the given positions, computed now."""
    states = np.empty((len(indices), base.width), base.dtype)
    rows = np.unique(positions.rows[indices])
    for number, text_states in base.states([texts[row] for row in rows]):
        in_text = np.flatnonzero(positions.rows[indices] == rows[number])
        places = positions.places[indices[in_text]] - texts.offsets[rows[number]]
        states[in_text] = text_states[places]
    return states
