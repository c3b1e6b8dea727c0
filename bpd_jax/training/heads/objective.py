"""What the training loop asks of the thing that it trains on a frozen model."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from bpd_jax.training.heads.base import Base
from bpd_jax.training.heads.held_out import HeldOut
from bpd_jax.training.heads.loss import LevelSums
from bpd_jax.training.heads.plan import Plan
from bpd_jax.typing import Array, Params, PyTree

# The folder of cached states in that of a run.
STATES = "states"


class Objective(Protocol):
    """Heads or a block drafter. Implementations are frozen dataclasses, jit-static."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model whose outputs are needed besides the final states."""
        ...

    def init(self, params: Params, plan: Plan, rng: Array) -> tuple[Params, Params]:
        """New trained parameters, float32, and frozen arrays that training reads.

        Args:
          params: of the frozen model.
          plan: of the training.
          rng: a key.
        """
        ...

    def loss_and_gradients(
        self, trained: Params, frozen: Params, batch: PyTree
    ) -> tuple[Array, LevelSums, Params]:
        """The loss of a batch, the sums that metrics are made of, and gradients."""
        ...

    def held_out_sums(self, trained: Params, frozen: Params, batch: PyTree) -> HeldOut:
        """Sums over a batch of positions to measure at."""
        ...

    def batches(
        self, base: Base, plan: Plan, folder: pathlib.Path, step: int
    ) -> tuple[Iterator[PyTree], list[PyTree], list[PyTree]]:
        """Batches to train on from `step` on, held-out ones, and some of training.

        Args:
          base: computes states that are missing.
          plan: of the training.
          folder: of the run.
          step: batches to leave out.
        """
        ...

    def save(
        self,
        folder: pathlib.Path,
        trained: Params,
        frozen: Params,
        *,
        base: str,
        base_name: str,
        facts: Mapping[str, Any],
    ) -> None:
        """Writes what was trained; the folder appears as a whole or not at all."""
        ...


def training_sample(train: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Positions of training to measure at: as many as held-out ones, or all."""
    kept = min(len(train), len(held_out))
    return train[np.arange(kept) * len(train) // max(kept, 1)]
