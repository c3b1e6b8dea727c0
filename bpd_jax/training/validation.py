"""Validation: its metrics; the best checkpoint and an early stop from them."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from bpd_jax.base.typing import Params
from bpd_jax.data.rows import Batch, PackedRows, make_batch
from bpd_jax.models.partitioning import BATCH_SPEC, from_own_rows
from bpd_jax.training import hosts
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.state import TrainState
from bpd_jax.training.step import make_eval_step


class Evaluator:
    """Computes validation metrics over the rows of the validation split, in order."""

    def __init__(
        self, config: TrainConfig, rows: PackedRows, abstract: TrainState, mesh: Mesh
    ) -> None:
        """Compiles the evaluation step now rather than in the first evaluation.

        A signal takes effect only between steps, so the first evaluation should not
        be much longer than later ones.
        """
        step = make_eval_step(config.loss(mesh), abstract)
        ids = np.zeros((config.batch_size, config.length), np.int32)
        sharding = NamedSharding(mesh, BATCH_SPEC)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            make_batch(ids, ids),
        )
        self._step = step.lower(abstract.params, batch).compile()
        self._config, self._rows, self._mesh = config, rows, mesh
        self._part, self._parts = hosts.batch_part(mesh)

    def __call__(self, params: Params) -> dict[str, float]:
        """The metrics that `config.columns` lists; equal in all processes."""
        size, limit = self._config.batch_size, self._config.evaluate_batches
        count = -(-len(self._rows) // size)
        count = count if limit is None else min(count, limit)
        sums = jax.device_get(
            [
                self._step(params, from_own_rows(self._batch(index * size), self._mesh))
                for index in range(count)
            ]
        )
        totals = [np.sum(column, axis=0) for column in zip(*sums, strict=True)]
        loss, correct, valid, entropy = totals
        valid = np.maximum(valid, 1)
        metrics = {
            "validation_loss": float(np.dot(self._config.lambdas, loss / valid)),
            **per_head("validation_loss", loss / valid),
            **per_head("validation_accuracy", correct / valid),
            **per_head("validation_entropy", entropy / valid),
        }
        # All processes must make the same decisions from these numbers.
        return hosts.agree(metrics)

    def _batch(self, first: int) -> Batch:
        """This process's rows of the batch that begins at row `first`, padded."""
        share = self._config.batch_size // self._parts
        first += self._part * share
        batch = self._rows.batch(slice(first, first + share))
        missing = share - len(batch.tokens)
        return Batch(*(np.pad(x, ((0, missing), (0, 0))) for x in batch))


def per_head(name: str, values: Iterable[float], first: int = 1) -> dict[str, float]:
    """Metrics by name, one for each head: `NAME_head_{first}`, …."""
    return {
        f"{name}_head_{head}": float(value)
        for head, value in enumerate(values, start=first)
    }


# Its key in the data item of a checkpoint.
_SELECTION = "selection"


@dataclasses.dataclass(frozen=True)
class Selection:
    """The best evaluation so far; saved with every checkpoint as JSON.

    Attributes:
      step: step of the best evaluation; None before the first one.
      value: the metric at that step.
      waited: number of evaluations since then.
      weights: λ_h, on which `validation_loss` depends.
    """

    name: str
    step: int | None = None
    value: float | None = None
    waited: int = 0
    weights: tuple[float, ...] = ()

    def after(self, step: int, row: Mapping[str, float]) -> "Selection":
        """The selection after an evaluation; equal values and NaN do not improve."""
        value = row[self.name]
        sign = -1 if "accuracy" in self.name else 1  # The lowest other metric is best.
        if not math.isnan(value) and (
            self.value is None or sign * value < sign * self.value
        ):
            return dataclasses.replace(self, step=step, value=value, waited=0)
        return dataclasses.replace(self, waited=self.waited + 1)

    def is_over(self, patience: int | None) -> bool:
        """Whether the last `patience` evaluations brought no improvement."""
        return patience is not None and self.waited >= patience

    def restored(
        self, saved: Mapping[str, Any] | None, steps: Collection[int]
    ) -> "Selection":
        """This new selection with the saved fields, if its checkpoint still exists.

        If the metric or the weights of `validation_loss` have changed since, only the
        step is restored, so that this checkpoint is kept until the next evaluation.
        """
        if saved is None or saved["step"] not in (None, *steps):
            return self
        name, weights = self.name, self.weights
        same = saved["name"] == name and (
            name != "validation_loss" or tuple(saved.get("weights", ())) == weights
        )
        names = ("step", "value", "waited") if same else ("step",)
        return dataclasses.replace(self, **{key: saved[key] for key in names})

    def __str__(self) -> str:
        if self.value is None:
            return f"no {self.name} yet"
        return f"best {self.name} {self.value:.4g} at step {self.step:,}"


@dataclasses.dataclass
class Decisions:
    """The best checkpoint, and whether to stop early.

    Attributes:
      validation: metrics of the last evaluation; {} before the first one.
    """

    config: TrainConfig
    selection: Selection
    validation: dict[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def restore(
        cls, config: TrainConfig, saved: Mapping[str, Any], steps: Collection[int]
    ) -> Self:
        """Those of a run, from the data item of its checkpoint, {} at the beginning."""
        selection = Selection(config.select_by, weights=config.lambdas)
        return cls(config, selection.restored(saved.get(_SELECTION), steps))

    @property
    def is_over(self) -> bool:
        """Whether the run stops early."""
        return self.selection.is_over(self.config.patience)

    def after(self, step: int, validation: dict[str, float]) -> int | None:
        """Takes an evaluation into account; returns the best step."""
        self.validation = validation
        self.selection = self.selection.after(step, validation)
        return self.selection.step

    def to_json(self) -> dict[str, Any]:
        return {_SELECTION: dataclasses.asdict(self.selection)}
