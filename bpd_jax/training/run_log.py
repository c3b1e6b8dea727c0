"""What a run shows while it trains: means, throughput, a progress bar, how it ends."""

import collections
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn, Self

import jax
import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.chips import chip_of_device
from bpd_jax.base.errors import UserError
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.model_flops import train_flops
from bpd_jax.training import hosts
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.metrics import MetricsWriter
from bpd_jax.training.run_names import CHECKPOINTS
from bpd_jax.training.step import Metrics
from bpd_jax.training.validation import per_head

# Key of the meter's state in the data item of a checkpoint.
METER = "meter"

_MEANS = ("loss", "loss_heads", "accuracy_heads", "gradient_norm")


class Meter:
    """Averages metrics since the last row; waits for the device only at a row.

    The sums are part of a checkpoint, so that a resumed run averages over the same
    steps as an uninterrupted one.
    """

    def __init__(
        self,
        per_step: int,
        unit: str = "tokens",
        peak: float | None = None,
        first_head: int = 1,
    ) -> None:
        """Creates an empty meter.

        A step takes `per_step` of a unit, such as tokens, over all devices; `peak` is
        from `peak_tokens_per_second`, and the metrics begin with head `first_head`.
        """
        self._per_step, self._unit, self._peak = per_step, unit, peak
        self._first_head = first_head
        self._pending: list[Metrics] = []
        self._sums: dict[str, np.ndarray] = {}
        self._steps = 0
        self._timed_steps = -1
        self._start_time = 0.0

    def add(self, metrics: Metrics) -> None:
        """Adds the metrics of one step, which may still be being computed."""
        self._pending.append(metrics)
        if self._timed_steps < 0:
            # The first step compiles, so it is not part of the throughput.
            jax.block_until_ready(metrics)
            self.restart()
        else:
            self._timed_steps += 1

    def restart(self) -> None:
        """Restarts the clock, so that the time since the last row does not count."""
        self._timed_steps, self._start_time = 0, time.perf_counter()

    def take(self) -> dict[str, float]:
        """Returns the means since the last call and starts new ones."""
        self._sum_pending()
        mean = {name: total / self._steps for name, total in self._sums.items()}
        values = {"loss": float(mean["loss"])}
        for kind in ("loss", "accuracy"):
            values |= per_head(kind, mean[f"{kind}_heads"], self._first_head)
        values["gradient_norm"] = float(mean["gradient_norm"])
        seconds = time.perf_counter() - self._start_time
        if self._timed_steps:
            speed = self._timed_steps * self._per_step / seconds
            values[f"{self._unit}_per_second"] = speed
            if self._peak is not None:
                values["model_flops_utilization"] = speed / self._peak
        self._sums, self._steps = {}, 0
        self.restart()
        return values

    def state(self) -> dict[str, Any]:
        self._sum_pending()
        sums = {name: total.tolist() for name, total in self._sums.items()}
        return {"steps": self._steps, "sums": sums}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a result of `state`; the clock starts anew."""
        self._steps = state["steps"]
        self._sums = {name: np.array(x) for name, x in state["sums"].items()}

    def _sum_pending(self) -> None:
        # Adding the steps one by one gives the same sums whenever this is called.
        for row in jax.device_get(self._pending):
            for name in _MEANS:
                total = self._sums.get(name, np.float64(0))
                self._sums[name] = total + np.asarray(row[name], np.float64)
        self._steps += len(self._pending)
        self._pending = []


def peak_tokens_per_second(
    model: BlockwiseConfig, length: int, drawn: int | None = None
) -> float | None:
    """Tokens per second if all devices ran at their peak; None for unknown devices.

    `length` is that of a row, of which heads or a block drafter are trained at `drawn`
    positions, or all.
    """
    chip = chip_of_device(jax.devices()[0].device_kind)
    if chip is None:
        return None
    peak = chip.flops * jax.device_count()
    return peak * length / train_flops(model, 1, length, drawn)


# Number of steps after which the host reads a result of a step: large enough for the
# device never to wait for the host, and small enough to stop soon.
LAG = 2


class RunLog:
    """The log of a run, a context manager; only the first process writes."""

    def __init__(
        self,
        folder: pathlib.Path,
        checkpoints: Checkpoints,
        start: int,
        steps: int,
        meter: Meter,
    ) -> None:
        """Creates the log of the steps after `start`.

        The meter is already restored if the run resumes.
        """
        self.meter = meter
        self._folder, self._checkpoints = folder, checkpoints
        self._start, self._steps = start, steps
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

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.__exit__(*error)

    def add(self, step: int, metrics: Metrics, *, read: bool) -> None:
        """Adds the metrics of a step, which may still be being computed.

        The host waits for it if it must `read` the state now, to log, evaluate or save
        it. A loss that is not finite ends the run, at the latest when it is read.
        """
        self.meter.add(metrics)
        self._unread.append((step, metrics["finite"]))
        while len(self._unread) > (0 if read else LAG):
            number, finite = self._unread.popleft()
            if not finite:
                raise self._not_finite(number)
        self._bar.update()

    def means(self, step: int, learning_rate: float) -> None:
        row = self.meter.take() | {"learning_rate": learning_rate}
        self._write(step, row)
        speeds = [
            f", {value:,.0f} {name.removesuffix('_per_second')}/s"
            for name, value in row.items()
            if name.endswith("_per_second")
        ]
        text = f"loss {row['loss']:.3f}" + "".join(speeds)
        self._bar.set_postfix_str(text, refresh=False)

    def evaluation(self, step: int, row: dict[str, float]) -> None:
        """Writes a row of metrics on held-out data, whose computation has no speed."""
        self._write(step, row)
        self.meter.restart()

    def publish(self) -> None:
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
            "OptimizerConfig.learning_rate and run the same command again, which "
            f"resumes from {resumed}; if the model has already diverged there, remove "
            f"the newest folder of {self._folder / CHECKPOINTS}."
        )
