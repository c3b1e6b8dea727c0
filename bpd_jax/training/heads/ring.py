"""A ring buffer of the frozen model's newest states, for large collections of texts.

It is for texts whose states would not fit on a disk. It takes C × 2 + 8 bytes of memory
for each of `capacity` states.
"""

from collections.abc import Iterator

import numpy as np

from bpd_jax.data.generations import Generations
from bpd_jax.training.heads.base import Base
from bpd_jax.training.heads.positions import Positions


class Ring:
    """A ring buffer of the states of the positions that were read last."""

    def __init__(
        self,
        texts: Generations,
        positions: Positions,
        rows: np.ndarray,
        base: Base,
        *,
        capacity: int,
        group: int,
        seed: int,
    ) -> None:
        """Reads texts until the ring is full.

        Args:
          texts: generated texts.
          positions: positions of all texts.
          rows: indices of the texts to read, repeatedly and in a new order every time.
          base: the frozen model.
          capacity: number of states, at most that of the positions in `rows`.
          group: texts that are read at a time.
          seed: seed of the orders and draws.
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

    @property
    def nbytes(self) -> int:
        """Bytes of the states and their position indices."""
        return self._states.nbytes + self._indices.nbytes

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
