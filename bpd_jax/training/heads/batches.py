"""Batches of positions with their states: one interface for disk and memory."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bpd_jax.training.heads.cache import States
from bpd_jax.training.heads.positions import Positions, epoch_order
from bpd_jax.training.heads.ring import Ring


class PositionBatch(NamedTuple):
    """Positions for one step of training; a pytree of host arrays.

    Attributes:
      states: `[n, D]` of the frozen model, in half precision.
      tokens: `[n, L]` int32, y_0 … y_{L-1}, the text after each position.
      valid: `[n, L]` bool, whether they lie in the text.
      later: `[n, L-1, D]` states after y_0 … y_{L-2}, with which the model itself
        predicts y_1 … y_{L-1}; None if nobody asks. Any where not valid.
    """

    states: np.ndarray
    tokens: np.ndarray
    valid: np.ndarray
    later: np.ndarray | None = None


def with_targets(
    positions: Positions, indices: np.ndarray, states: np.ndarray, block_size: int
) -> PositionBatch:
    """The batch of some positions and their states."""
    return PositionBatch(states, *positions.after(indices, block_size))


def measured_batches(
    positions: Positions,
    indices: np.ndarray,
    states: np.ndarray,
    size: int,
    block_size: int,
) -> list[PositionBatch]:
    """All of some positions in batches of one size; the last is filled up.

    Args:
      positions: of all texts.
      indices: positions to measure at.
      states: of these.
      size: of a batch; smaller if there are not so many positions.
      block_size: L.
    """
    batches = []
    for first in range(0, len(indices), size):
        part = slice(first, first + size)
        batch = with_targets(positions, indices[part], states[part], block_size)
        missing = min(size, len(indices)) - len(batch.tokens)
        batches.append(
            PositionBatch(*(np.pad(x, ((0, missing), (0, 0))) for x in batch[:3]))
        )
    return batches


def cached_batches(
    states: States,
    indices: np.ndarray,
    size: int,
    block_size: int,
    seed: int,
    step: int = 0,
    *,
    later: bool = False,
) -> Iterator[PositionBatch]:
    """Endless batches of cached positions; an epoch drops less than a batch.

    Args:
      states: the cache.
      indices: positions to draw from.
      size: of a batch; smaller if there are not so many positions.
      block_size: L.
      seed: of the order, which depends on nothing else.
      step: how many batches to leave out.
      later: whether the states after the tokens that follow come along.
    """
    size = min(size, len(indices))
    per_epoch = len(indices) // size
    epoch, step = divmod(step, per_epoch)
    while True:
        order = epoch_order(len(indices), seed, epoch)
        for number in range(step, per_epoch):
            picked = indices[order[number * size : (number + 1) * size]]
            found = states.read(picked)
            batch = with_targets(states.positions, picked, found, block_size)
            if later:
                batch = batch._replace(later=_later(states, picked, block_size))
            yield batch
        epoch, step = epoch + 1, 0


def _later(states: States, picked: np.ndarray, block_size: int) -> np.ndarray:
    """`[n, L-1, D]`: the states at the positions after some; see `PositionBatch`."""
    places = picked[:, None] + np.arange(1, block_size)
    # Past the end of a text its neighbour's stand, which no target goes with.
    places = np.minimum(places, len(states.positions) - 1)
    return states.read(places.ravel()).reshape(*places.shape, -1)


def ring_batches(
    ring: Ring, positions: Positions, size: int, block_size: int, uses: float
) -> Iterator[PositionBatch]:
    """Endless batches from a ring, which reads on as it is used.

    Args:
      ring: the ring.
      positions: of all texts.
      size: of a batch.
      block_size: L.
      uses: how often a state is drawn on average.
    """
    owed = 0.0
    while True:
        picked, found = ring.draw(size)
        yield with_targets(positions, picked, found, block_size)
        owed += size / uses
        if owed >= 1:
            before = ring.added
            ring.add(int(owed))
            # A group of texts may bring more than was owed.
            owed -= ring.added - before
