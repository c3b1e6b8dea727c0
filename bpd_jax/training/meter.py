"""Means of the metrics between two rows of them, and the speed."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from bpd_jax.training.evaluator import per_head
from bpd_jax.training.step import Metrics

_MEANS = ("loss", "loss_heads", "accuracy_heads", "gradient_norm")


class Meter:
    """Averages metrics since the last row; the device is waited for only there.

    Sums go into a checkpoint, so that a run that goes on averages over the same steps
    as one that was never interrupted.
    """

    def __init__(
        self,
        per_step: int,
        unit: str = "tokens",
        peak: float | None = None,
        first_head: int = 1,
    ) -> None:
        """Starts with nothing.

        Args:
          per_step: tokens of a step over all devices, or whatever the unit is.
          unit: of the speed.
          peak: tokens per second at the devices' peak; see `throughput`.
          first_head: the head that comes first in the metrics.
        """
        self._per_step, self._unit, self._peak = per_step, unit, peak
        self._first_head = first_head
        self._waiting: list[Metrics] = []
        self._sums: dict[str, np.ndarray] = {}
        self._steps = 0
        self._timed = -1
        self._clock = 0.0

    def add(self, metrics: Metrics) -> None:
        """Takes the metrics of one step, still being computed."""
        self._waiting.append(metrics)
        if self._timed < 0:
            # The first step compiles: wait for it and leave it out of the speed.
            jax.block_until_ready(metrics)
            self.restart()
        else:
            self._timed += 1

    def restart(self) -> None:
        """Leaves out the time since the last row, spent on something else."""
        self._timed, self._clock = 0, time.perf_counter()

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        self._add_up()
        mean = {name: total / self._steps for name, total in self._sums.items()}
        values = {"loss": float(mean["loss"])}
        for kind in ("loss", "accuracy"):
            values |= per_head(kind, mean[f"{kind}_heads"], self._first_head)
        values["gradient_norm"] = float(mean["gradient_norm"])
        seconds = time.perf_counter() - self._clock
        if self._timed:
            speed = self._timed * self._per_step / seconds
            values[f"{self._unit}_per_second"] = speed
            if self._peak is not None:
                values["model_flops_utilization"] = speed / self._peak
        self._sums, self._steps = {}, 0
        self.restart()
        return values

    def state(self) -> dict[str, Any]:
        """The sums since the last row, for `restore`, as JSON."""
        self._add_up()
        sums = {name: total.tolist() for name, total in self._sums.items()}
        return {"steps": self._steps, "sums": sums}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned; speeds are those of this process."""
        self._steps = state["steps"]
        self._sums = {name: np.array(x) for name, x in state["sums"].items()}

    def _add_up(self) -> None:
        # One step after the other, so that it does not matter when this is done.
        for row in jax.device_get(self._waiting):
            for name in _MEANS:
                total = self._sums.get(name, np.float64(0))
                self._sums[name] = total + np.asarray(row[name], np.float64)
        self._steps += len(self._waiting)
        self._waiting = []


def short(row: dict[str, float]) -> str:
    """A row of metrics for the progress bar."""
    speeds = [
        f", {value:,.0f} {name.removesuffix('_per_second')}/s"
        for name, value in row.items()
        if name.endswith("_per_second")
    ]
    return f"loss {row['loss']:.3f}" + "".join(speeds)
