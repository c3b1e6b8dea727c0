"""The training run: mesh, data, shapes, shardings, init, restore, loop."""

import contextlib
import os
import pathlib
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from bpd_jax import progress
from bpd_jax.data import prepare
from bpd_jax.data.rows import Batch, PackedRows, RowIterator
from bpd_jax.data.spec import SPLITS
from bpd_jax.errors import UserError
from bpd_jax.models.partitioning import make_mesh
from bpd_jax.training import run_folder
from bpd_jax.training.checkpoints import FOLDER as CHECKPOINTS
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.metrics import MetricsWriter
from bpd_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bpd_jax.training.plan import describe_run
from bpd_jax.training.signals import noted_signals
from bpd_jax.training.state import (
    TrainState,
    abstract_state,
    init_state,
    with_trunk,
)
from bpd_jax.training.step import (
    Metrics,
    make_eval_step,
    make_train_step,
    put_batch,
)
from bpd_jax.typing import Params


def train(
    config: TrainConfig,
    workdir: str | os.PathLike[str],
    text: str = "",
    operative: str = "",
    trunk: Params | None = None,
) -> dict[str, float]:
    """Trains, or goes on with, the run in `workdir`.

    SIGTERM and Ctrl-C end it after the current step with a checkpoint.

    Args:
      config: the run.
      workdir: its folder; see `run_folder`.
      text: the gin text that `config` comes from, kept in the folder.
      operative: the part of `text` in force, likewise.
      trunk: parameters to begin with instead of random ones; see `TrainConfig.start`.

    Returns:
      Losses on the validation split at the last step: `validation_loss` and, per
      head, `validation_loss_head_h`; {} if the run was stopped before.

    Raises:
      UserError: the configuration, the folder or the data do not fit.
      SystemExit: with 128 + the signal's number, if one ended the run.
    """
    folder = pathlib.Path(workdir)
    run_folder.check_usable(folder, config)
    mesh = make_mesh(config.mesh)
    check_batch(config, mesh)
    train_rows, validation_rows = _rows(config, folder)
    batches = RowIterator(
        train_rows,
        config.batch_size,
        config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    abstract = abstract_state(config.model, optimizer, mesh)
    is_first = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpoints(folder / CHECKPOINTS, config.keep_checkpoints)
        )
        start = checkpoints.latest_step or 0
        if start >= config.steps:
            print(
                f"already finished: {folder} is at step {start:,}; raise "
                "TrainConfig.steps to train it further."
            )
            return {}
        if start:
            state, place = checkpoints.restore(abstract)
            batches.restore(place)
        else:
            state = init_state(config.model, optimizer, abstract, config.seed)
            if trunk is not None:
                state = with_trunk(state, trunk)
        if is_first:
            run_folder.describe(folder, config, text, operative)
        print(describe_run(config, train_rows, validation_rows, start), flush=True)

        step_fn = make_train_step(
            config.model, optimizer, config.lambdas, abstract, mesh
        )
        evaluate = _Evaluator(config, validation_rows, abstract, mesh)
        meter = _Meter(config.tokens_per_step)
        writer = stack.enter_context(MetricsWriter(folder, start, enabled=is_first))
        bar = stack.enter_context(
            progress.bar(
                label="training", total=config.steps, initial=start, unit="step"
            )
        )
        stop = stack.enter_context(noted_signals())
        for step in range(start + 1, config.steps + 1):
            state, metrics = step_fn(state, put_batch(next(batches), mesh))
            meter.add(metrics)
            stopping = bool(stop)
            last = stopping or step == config.steps
            if last or step % config.log_every == 0:
                row = meter.take() | {"learning_rate": float(schedule(step - 1))}
                writer.write(step, row)
                bar.set_postfix_str(_short(row), refresh=False)
            if step == config.steps or step % config.evaluate_every == 0:
                validation = evaluate(state.params)
                writer.write(step, validation)
                meter.restart()
            if last or step % config.checkpoint_every == 0:
                checkpoints.save(step, state, batches.state())
            bar.update()
            if stopping:
                break
    if stopping and step < config.steps:
        print(
            f"stopped: {folder} is saved at step {step:,} of {config.steps:,}; run the "
            "same command again to go on."
        )
        sys.exit(128 + stop[0])
    print(_closing(validation, folder))
    return validation


def check_batch(config: TrainConfig, mesh: Mesh) -> None:
    """Raises a `UserError` unless the devices can share out a batch."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.batch_size % parts:
        raise UserError(
            f"TrainConfig.batch_size = {config.batch_size} is not a multiple of "
            f"data × fsdp = {parts}, the number of parts that the mesh splits it into."
        )


def _rows(config: TrainConfig, folder: pathlib.Path) -> tuple[PackedRows, PackedRows]:
    """The packed rows of both splits, made by the first process if need be."""
    both = []
    for turn in (0, 1):
        if (jax.process_index() == 0) == (turn == 0):
            both = [
                prepare.prepare_rows(
                    config.task, split, config.length, folder / run_folder.DATA / split
                )
                for split in SPLITS
            ]
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"rows {turn}")
    train_rows, validation_rows = both
    vocab_size = config.model.trunk.vocab_size
    if train_rows.vocab_size != vocab_size:
        raise UserError(
            f"the vocabulary {config.task.vocabulary} has {train_rows.vocab_size} "
            f"tokens but TransformerConfig.vocab_size is {vocab_size}: set it to "
            f"{train_rows.vocab_size}, or to @vocabulary_size()."
        )
    for rows in both:
        if not len(rows):
            raise UserError(
                f"the {rows.split} split of {config.task.name} has no rows: give more "
                "text."
            )
    return train_rows, validation_rows


class _Meter:
    """Averages metrics since the last row; the device is waited for only there."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
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
            values |= _per_head(kind, mean[f"{kind}_heads"])
        values["gradient_norm"] = float(mean["gradient_norm"])
        seconds = time.perf_counter() - self._clock
        if self._timed:
            values["tokens_per_second"] = self._timed * self._tokens_per_step / seconds
        self._waiting = []
        self.restart()
        return values


class _Evaluator:
    """The losses on the validation split, in the order of its rows."""

    def __init__(
        self, config: TrainConfig, rows: PackedRows, abstract: TrainState, mesh: Mesh
    ) -> None:
        self._step = make_eval_step(config.model, config.lambdas, abstract, mesh)
        self._config, self._rows, self._mesh = config, rows, mesh

    def __call__(self, params: Params) -> dict[str, float]:
        size, limit = self._config.batch_size, self._config.evaluate_batches
        count = -(-len(self._rows) // size)
        count = count if limit is None else min(count, limit)
        sums = [
            self._step(params, put_batch(self._batch(index * size), self._mesh))
            for index in range(count)
        ]
        loss, correct, valid = (
            np.sum(column, axis=0) for column in zip(*jax.device_get(sums), strict=True)
        )
        valid = np.maximum(valid, 1)
        total = float(np.dot(self._config.lambdas, loss / valid))
        return {
            "validation_loss": total,
            **_per_head("validation_loss", loss / valid),
            **_per_head("validation_accuracy", correct / valid),
        }

    def _batch(self, first: int) -> Batch:
        """This process's rows of the batch at `first`, filled up with padding."""
        share = self._config.batch_size // jax.process_count()
        first += jax.process_index() * share
        batch = self._rows.batch(slice(first, first + share))
        missing = share - len(batch.tokens)
        return Batch(*(np.pad(x, ((0, missing), (0, 0))) for x in batch))


def _per_head(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name}_head_{h}": float(value) for h, value in enumerate(values, start=1)}


def _short(row: dict[str, float]) -> str:
    speed = row.get("tokens_per_second")
    return f"loss {row['loss']:.3f}" + (f", {speed:,.0f} tokens/s" if speed else "")


def _closing(validation: dict[str, float], folder: pathlib.Path) -> str:
    losses = [
        f"{value:.3f}"
        for name, value in validation.items()
        if name.startswith("validation_loss_head_")
    ]
    return (
        f"finished: validation loss per head {', '.join(losses)} (nats per token); "
        f"the run is in {folder}"
    )
