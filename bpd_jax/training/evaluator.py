"""Evaluation of a model on the validation split."""

from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from bpd_jax.base.typing import Params
from bpd_jax.data.rows import Batch, PackedRows, make_batch
from bpd_jax.models.partitioning import BATCH_SPEC
from bpd_jax.training import hosts
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.state import TrainState
from bpd_jax.training.step import make_eval_step, put_batch


class Evaluator:
    """Computes validation metrics over the rows of the validation split, in order."""

    def __init__(
        self, config: TrainConfig, rows: PackedRows, abstract: TrainState, mesh: Mesh
    ) -> None:
        """Compiles the evaluation step now rather than in the first evaluation.

        A signal takes effect only between steps, so the first evaluation should not
        be much longer than later ones.

        Args:
          config: settings of the run.
          rows: rows of the validation split.
          abstract: shapes and shardings of the train state.
          mesh: devices.
        """
        step = make_eval_step(config.model, abstract, mesh, config.compute, config.loss)
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
                self._step(params, put_batch(self._batch(index * size), self._mesh))
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
