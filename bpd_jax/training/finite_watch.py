"""Ends a run whose loss is not finite, and saves the batch that caused it."""

import collections
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from bpd_jax.base.errors import UserError
from bpd_jax.storage import array_files
from bpd_jax.training.checkpoints import FOLDER as CHECKPOINTS
from bpd_jax.training.distributed import LAG
from bpd_jax.training.step import Metrics

FOLDER = "nonfinite"


class FiniteWatch:
    """Checks the loss and gradient norm of every step, with a delay.

    A step whose loss or gradient norm is not finite leaves the train state unchanged.
    Its flag is read `LAG` steps later, so that the host does not wait for the device,
    but always before the state is evaluated, logged or saved.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        steps: Callable[[], list[int]],
        learning_rate: str = "OptimizerConfig.learning_rate",
    ) -> None:
        """Creates the watch of a run.

        Args:
          folder: run folder.
          steps: returns the steps of the run's checkpoints.
          learning_rate: name of the learning-rate setting, for the error message.
        """
        self._folder, self._steps, self._rate = folder, steps, learning_rate
        self._pending: collections.deque[tuple[int, Any, Metrics]] = collections.deque()

    def add(self, step: int, batch: Any, metrics: Metrics) -> None:
        """Adds a step, which may still be being computed, with this process's batch."""
        self._pending.append((step, batch, metrics))

    def check(self, *, all_steps: bool) -> None:
        """Checks the steps before the last `LAG` ones, or all steps.

        Raises:
          UserError: the loss or the gradient norm of a step is not finite.
        """
        while len(self._pending) > (0 if all_steps else LAG):
            step, batch, metrics = self._pending.popleft()
            if not metrics["finite"]:
                path = self._save(step, batch, metrics)
                raise UserError(
                    f"the loss or gradient of step {step:,} is not finite: the batch "
                    f"is saved in {path}; lower {self._rate}, or inspect the batch, "
                    f"and run the same command again: {self._resume_hint()}."
                )

    def _resume_hint(self) -> str:
        """Describes how to resume, from the newest or an earlier checkpoint."""
        *earlier, newest = [0, *sorted(self._steps())]
        if not earlier:
            return "the run starts from the beginning"
        previous = earlier[-1]
        target = f"checkpoint {previous:,}" if previous else "the beginning"
        return (
            f"the run resumes from checkpoint {newest:,}; if the model has already "
            f"diverged there, remove {self._folder / CHECKPOINTS / str(newest)} to "
            f"resume from {target}"
        )

    def _save(self, step: int, batch: Any, metrics: Metrics) -> pathlib.Path:
        name = f"step_{step}.npz"
        if jax.process_count() > 1:
            name = f"step_{step}_process_{jax.process_index()}.npz"
        fields = {**batch._asdict(), **jax.device_get(metrics)}
        arrays = {key: value for key, value in fields.items() if value is not None}
        path = self._folder / FOLDER / name
        array_files.write_npz(path, arrays)
        return path
