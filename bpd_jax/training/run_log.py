"""What a run shows while it trains: rows of metrics, a progress bar, how it ends."""

import collections
import pathlib
import sys
from types import TracebackType
from typing import Any, NoReturn, Self

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.training import hosts
from bpd_jax.training.checkpoints import FOLDER as CHECKPOINTS
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.meter import Meter, short
from bpd_jax.training.metrics import MetricsWriter
from bpd_jax.training.step import Metrics

# Number of steps after which the host reads a result of a step: large enough for the
# device never to wait for the host, and small enough to stop soon.
LAG = 2


class RunLog:
    """The log of a run, a context manager; only the first process writes.

    Attributes:
      meter: averages the metrics of the steps.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        checkpoints: Checkpoints,
        start: int,
        steps: int,
        meter: Meter,
        rate_name: str = "OptimizerConfig.learning_rate",
    ) -> None:
        """Creates the log of the steps after `start`.

        Args:
          folder: run folder.
          checkpoints: checkpoints of the run.
          start: number of completed steps.
          steps: number of all steps.
          meter: meter of the run, already restored if the run resumes.
          rate_name: name of the learning-rate setting, for error messages.
        """
        self.meter = meter
        self._folder, self._checkpoints = folder, checkpoints
        self._start, self._steps, self._rate_name = start, steps, rate_name
        # Steps whose loss the host has not read yet.
        self._unread: collections.deque[tuple[int, Any]] = collections.deque()
        self._writer: MetricsWriter | None = None

    def __enter__(self) -> Self:
        self._writer = hosts.first(lambda: MetricsWriter(self._folder, self._start))
        self._bar = progress.bar(
            label="training",
            total=self._steps,
            initial=self._start,
            unit="step",
            disable=not hosts.is_first(),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.__exit__(kind, error, trace)

    def add(self, step: int, metrics: Metrics, *, read: bool) -> None:
        """Adds the metrics of a step, which may still be being computed.

        It raises a `UserError` if the loss of this or of an earlier step is not finite.

        Args:
          step: number of the step.
          metrics: result of the step.
          read: whether the state will be logged, evaluated or saved now, so that the
            host must wait for it.
        """
        self.meter.add(metrics)
        self._unread.append((step, metrics["finite"]))
        while len(self._unread) > (0 if read else LAG):
            number, finite = self._unread.popleft()
            if not finite:
                raise self._not_finite(number)
        self._bar.update()

    def means(self, step: int, learning_rate: float) -> None:
        """Writes the means since the last row."""
        row = self.meter.take() | {"learning_rate": learning_rate}
        self._write(step, row)
        self._bar.set_postfix_str(short(row), refresh=False)

    def evaluation(self, step: int, row: dict[str, float]) -> None:
        """Writes a row of metrics on held-out data, whose computation has no speed."""
        self._write(step, row)
        self.meter.restart()

    def publish(self) -> None:
        """See `MetricsWriter.publish`."""
        if self._writer is not None:
            self._writer.publish()

    def stopped(self, step: int, number: int) -> NoReturn:
        """Ends the process after a signal, with the status of shells, 128 + number."""
        hosts.print_once(
            f"stopped: {self._folder} is saved at step {step:,} of {self._steps:,}; "
            "run the same command again to resume."
        )
        sys.exit(128 + number)

    def _write(self, step: int, row: dict[str, float]) -> None:
        if self._writer is not None:
            self._writer.write(step, row)

    def _not_finite(self, step: int) -> UserError:
        newest = max(self._checkpoints.steps(), default=0)
        resumed = f"checkpoint {newest:,}" if newest else "the beginning"
        # The step has left the state unchanged.
        return UserError(
            f"the loss or gradient of step {step:,} is not finite: lower "
            f"{self._rate_name} and run the same command again, which resumes from "
            f"{resumed}; if the model has already diverged there, remove the newest "
            f"folder of {self._folder / CHECKPOINTS}."
        )
