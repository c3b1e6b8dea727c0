"""Means of the metrics between two rows of them, and the speed."""

import time

import jax
import numpy as np

from bpd_jax.training.evaluator import per_head
from bpd_jax.training.step import Metrics


class Meter:
    """Averages metrics since the last row; the device is waited for only there."""

    def __init__(self, tokens_per_step: int, peak_tokens: float | None = None) -> None:
        """Starts with nothing.

        Args:
          tokens_per_step: over all devices.
          peak_tokens: tokens per second at the devices' peak; see `throughput`.
        """
        self._tokens_per_step, self._peak_tokens = tokens_per_step, peak_tokens
        self._waiting: list[Metrics] = []
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
        rows: list[dict[str, np.ndarray]] = jax.device_get(self._waiting)
        mean = {name: np.mean([row[name] for row in rows], axis=0) for name in rows[0]}
        values = {"loss": float(mean["loss"])}
        for kind in ("loss", "accuracy"):
            values |= per_head(kind, mean[f"{kind}_heads"])
        values["gradient_norm"] = float(mean["gradient_norm"])
        seconds = time.perf_counter() - self._clock
        if self._timed:
            speed = self._timed * self._tokens_per_step / seconds
            values["tokens_per_second"] = speed
            if self._peak_tokens is not None:
                values["model_flops_utilization"] = speed / self._peak_tokens
        self._waiting = []
        self.restart()
        return values


def short(row: dict[str, float]) -> str:
    """A row of metrics for the progress bar."""
    speed = row.get("tokens_per_second")
    return f"loss {row['loss']:.3f}" + (f", {speed:,.0f} tokens/s" if speed else "")
