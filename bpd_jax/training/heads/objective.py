"""The protocol that the objectives of heads and of block drafters implement."""

import pathlib
from typing import Protocol, Unpack

import numpy as np

from bpd_jax.models.attachments import About
from bpd_jax.training.frozen import Batches, Objective
from bpd_jax.training.heads.base import Base
from bpd_jax.training.heads.plan import Plan
from bpd_jax.typing import Array, Params

# Name of the folder of cached states in a run folder.
STATES = "states"

# Neighbouring positions in a sample of those of training.
_RUN = 32


class HeadsOrDrafter(Objective, Protocol):
    """The objective of heads or of a block drafter."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model whose outputs are needed besides the final states."""
        ...

    def init(
        self, params: Params, vocabulary: np.ndarray | None, rng: Array
    ) -> tuple[Params, Params]:
        """Initial trained parameters, float32, and the frozen arrays.

        Args:
          params: parameters of the frozen model.
          vocabulary: ids of the draft vocabulary; None for all tokens.
          rng: random key.
        """
        ...

    def batches(
        self, base: Base, plan: Plan, folder: pathlib.Path, step: int
    ) -> Batches:
        """Training and held-out batches.

        Args:
          base: frozen model, which computes missing states.
          plan: plan of the run.
          folder: run folder.
          step: number of batches to skip.
        """
        ...

    def save(
        self, folder: pathlib.Path, params: Params, **about: Unpack[About]
    ) -> None:
        """Writes the trained parameters and the draft vocabulary; see `attachments`."""
        ...


def training_sample(train: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Training positions to evaluate: as many as held-out ones, or all.

    They are runs of neighbours, spread over the texts, because a block drafter reads
    the states of a whole text for each group of positions.
    """
    count = min(len(train), len(held_out))
    runs = -(-count // _RUN)
    starts = np.arange(runs) * len(train) // max(runs, 1)
    sample = (starts[:, None] + np.arange(_RUN)).ravel()
    return train[np.unique(np.minimum(sample, len(train) - 1))[:count]]
