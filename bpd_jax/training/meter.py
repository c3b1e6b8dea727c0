"""Means of the training metrics between two rows of the log, and the throughput."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.model_flops import train_flops
from bpd_jax.training.evaluator import per_head
from bpd_jax.training.step import Metrics

# Dense bfloat16 FLOP/s per jax device, from the vendors' data sheets. Keys are prefixes
# of `device_kind`; the longest matching prefix counts.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
}

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

        Args:
          per_step: tokens, or other units, of a step over all devices.
          unit: what the throughput counts.
          peak: result of `peak_tokens_per_second`.
          first_head: number of the first head in the metrics.
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
        """The sums since the last row as JSON, for `restore`."""
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


def short(row: dict[str, float]) -> str:
    """The loss and the throughput of a row of metrics, for the progress bar."""
    speeds = [
        f", {value:,.0f} {name.removesuffix('_per_second')}/s"
        for name, value in row.items()
        if name.endswith("_per_second")
    ]
    return f"loss {row['loss']:.3f}" + "".join(speeds)


def peak_tokens_per_second(
    model: BlockwiseConfig, length: int, drawn: int | None = None
) -> float | None:
    """Tokens per second if all devices ran at their peak; None for unknown devices.

    Args:
      model: sizes of the model.
      length: T, tokens of a row.
      drawn: positions of a row that heads or a block drafter are trained at; None for
        all.
    """
    kind = jax.devices()[0].device_kind
    matching = [name for name in PEAK_FLOPS if kind.startswith(name)]
    if not matching:
        return None
    peak = PEAK_FLOPS[max(matching, key=len)] * jax.device_count()
    return peak * length / train_flops(model, 1, length, drawn)
