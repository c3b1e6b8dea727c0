"""What the training of heads or a block drafter asks of either."""

import pathlib
from typing import Protocol, Unpack

import numpy as np

from bpd_jax.models.attachments import About
from bpd_jax.training.frozen import Batches, Objective
from bpd_jax.training.heads.base import Base
from bpd_jax.training.heads.plan import Plan
from bpd_jax.typing import Array, Params

# The folder of cached states in that of a run.
STATES = "states"

# Neighbouring positions in a sample of those of training.
_RUN = 32


class HeadsOrDrafter(Objective, Protocol):
    """Heads or a block drafter."""

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

    def batches(
        self, base: Base, plan: Plan, folder: pathlib.Path, step: int
    ) -> Batches:
        """Batches to train on and to measure on.

        Args:
          base: computes states that are missing.
          plan: of the training.
          folder: of the run.
          step: batches to leave out.
        """
        ...

    def save(
        self, folder: pathlib.Path, params: Params, **about: Unpack[About]
    ) -> None:
        """Writes trained parameters and the draft vocabulary; see `attachments`."""
        ...


def training_sample(train: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Positions of training to measure at: as many as held-out ones, or all.

    They are runs of neighbours, spread over the texts: a block drafter reads the states
    of a whole text for each group of its positions.
    """
    count = min(len(train), len(held_out))
    runs = -(-count // _RUN)
    starts = np.arange(runs) * len(train) // max(runs, 1)
    sample = (starts[:, None] + np.arange(_RUN)).ravel()
    return train[np.unique(np.minimum(sample, len(train) - 1))[:count]]
