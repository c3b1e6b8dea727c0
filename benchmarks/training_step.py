"""A compiled training step on random tokens, for the benchmarks that time it."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bpd_jax.data.rows import Batch, make_batch
from bpd_jax.models.partitioning import from_own_rows
from bpd_jax.training import hosts
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.run_log import peak_tokens_per_second
from bpd_jax.training.state import abstract_state, init_state, make_optimizer
from bpd_jax.training.step import make_train_step


class TimedStep:
    """A compiled step and, between `place` and `remove`, a state on the devices.

    Attributes:
      planned: bytes per device planned by XLA: state, batch, temporaries.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self._config = config
        self._optimizer = make_optimizer(config.optimizer, config.steps)
        self._abstract = abstract_state(
            config.model, self._optimizer, mesh, config.compute
        )
        self._state: Any = None
        step: Any = make_train_step(
            config.loss(mesh), config.lambdas, self._optimizer, self._abstract
        )
        _, parts = hosts.batch_part(mesh)
        share = (config.batch_size // parts, config.length)
        tokens = np.random.default_rng(config.seed).integers(
            0, config.model.trunk.vocab_size, share
        )
        self._mesh = mesh
        self._batch = from_own_rows(make_batch(tokens, np.ones(share)), mesh)
        self._metrics: Any = None
        lowered = step.lower(self._abstract, self._batch)
        self._step = lowered.compile()
        memory = self._step.memory_analysis()
        self.planned = (
            memory.argument_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )

    def place(self) -> None:
        """Allocates a new state on the devices."""
        config = self._config
        self._state = init_state(
            config.model, self._optimizer, self._abstract, config.seed, config.compute
        )

    def remove(self) -> None:
        """Frees the memory of `place`."""
        self._state = None

    def block(self, steps: int, batches: Iterator[Batch] | None = None) -> float:
        """Runs a block of steps and returns the seconds per step.

        Args:
          steps: number of steps.
          batches: their batches; None for random tokens.
        """
        start = time.perf_counter()
        for _ in range(steps):
            batch = self._batch
            if batches is not None:
                batch = from_own_rows(next(batches), self._mesh)
            self._state, self._metrics = self._step(self._state, batch)
        jax.block_until_ready((self._state, self._metrics))
        return (time.perf_counter() - start) / steps

    @property
    def params(self) -> Any:
        """The parameters after the last step."""
        return self._state.params

    def metrics(self) -> dict[str, Any]:
        """The metrics of the last step: numbers, and lists with one for each head."""
        return {
            name: np.asarray(value).tolist() for name, value in self._metrics.items()
        }


def speed_of(config: TrainConfig, seconds: list[float]) -> dict[str, Any]:
    """Tokens per second and MFU, from the seconds per step of each block."""
    speed = config.tokens_per_step / statistics.median(seconds)
    peak = peak_tokens_per_second(
        config.model, config.length, config.drawn_per_row(config.model)
    )
    return {
        "seconds_per_step": seconds,
        "tokens_per_second": speed,
        "mfu": None if peak is None else speed / peak,
    }
