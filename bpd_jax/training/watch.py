"""Ends a run whose loss is not finite, and saves the batch that caused it."""

import collections
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bpd_jax import files
from bpd_jax.errors import UserError
from bpd_jax.training.checkpoints import FOLDER as CHECKPOINTS
from bpd_jax.training.distributed import LAG
from bpd_jax.training.step import Metrics

FOLDER = "nonfinite"


class FiniteWatch:
    """Checks the loss and gradient norm of every step, with a delay.

    The step itself leaves the state as it was when they are not finite. The flag is
    read `LAG` steps later, when it has long been there, and before anything is made
    of the state.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        steps: Callable[[], list[int]],
        learning_rate: str = "OptimizerConfig.learning_rate",
    ) -> None:
        """Watches a run.

        Args:
          folder: of the run.
          steps: gives the steps of its checkpoints.
          learning_rate: name of the setting to lower.
        """
        self._folder, self._steps, self._rate = folder, steps, learning_rate
        self._waiting: collections.deque[tuple[int, Any, Metrics]] = collections.deque()

    def add(self, step: int, batch: Any, metrics: Metrics) -> None:
        """Takes a step that is still being computed, with this process's batch."""
        self._waiting.append((step, batch, metrics))

    def check(self, *, all_steps: bool) -> None:
        """Looks at the steps before the last `LAG` ones, or at all of them.

        Raises:
          UserError: one of them was not finite.
        """
        while len(self._waiting) > (0 if all_steps else LAG):
            step, batch, metrics = self._waiting.popleft()
            if not metrics["finite"]:
                path = self._save(step, batch, metrics)
                raise UserError(
                    f"the loss of step {step:,}, or its gradient, is not finite: the "
                    f"batch is in {path}; lower {self._rate}, or look at the batch, "
                    f"and run the same command again: {self._way_on()}."
                )

    def _way_on(self) -> str:
        """Where the run goes on, and how it can do so from further back."""
        *earlier, newest = [0, *sorted(self._steps())]
        if not earlier:
            return "the run begins anew"
        before = earlier[-1]
        back = f"go back to checkpoint {before:,}" if before else "begin anew"
        return (
            f"the run goes on from checkpoint {newest:,}; if the parameters have been "
            f"useless there already, remove {self._folder / CHECKPOINTS / str(newest)} "
            f"to {back}"
        )

    def _save(self, step: int, batch: Any, metrics: Metrics) -> pathlib.Path:
        name = f"step_{step}.npz"
        if jax.process_count() > 1:
            name = f"step_{step}_process_{jax.process_index()}.npz"
        fields = {**batch._asdict(), **jax.device_get(metrics)}
        arrays = {key: value for key, value in fields.items() if value is not None}
        path = self._folder / FOLDER / name
        with files.replacing_file(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, **arrays)
        return path
