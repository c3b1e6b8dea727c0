"""Training a whole model: mesh, data, shapes, shardings, initial or saved state."""

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from bpd_jax.buckets import as_path
from bpd_jax.data.rows import Batch, RowIterator
from bpd_jax.errors import UserError
from bpd_jax.training import distributed, loop, peers, run_folder
from bpd_jax.training.checkpoint_files import whole_steps
from bpd_jax.training.checkpoints import FOLDER as CHECKPOINTS
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.disk_space import check_space
from bpd_jax.training.distributed import say
from bpd_jax.training.evaluator import Evaluator
from bpd_jax.training.head_schedule import HeadSchedule
from bpd_jax.training.meter import Meter
from bpd_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bpd_jax.training.plan import describe_run
from bpd_jax.training.relayout import restore_state
from bpd_jax.training.run_lock import locked
from bpd_jax.training.run_rows import make_run_rows, open_run_rows
from bpd_jax.training.selection import Selection
from bpd_jax.training.slices import make_mesh
from bpd_jax.training.state import (
    TrainState,
    abstract_state,
    init_state,
    with_parameters,
)
from bpd_jax.training.step import Metrics, make_train_step, put_batch
from bpd_jax.training.throughput import peak_tokens_per_second
from bpd_jax.typing import Params

# Names in the data item of a checkpoint, beside those of `RowIterator.state`.
_SELECTION, _HEAD_SCHEDULE = "selection", "head_schedule"


def train(
    config: TrainConfig,
    workdir: str | os.PathLike[str],
    text: str = "",
    operative: str = "",
    given: Callable[[], Params] | None = None,
) -> dict[str, float]:
    """Trains, or resumes, the run in `workdir`.

    SIGTERM and Ctrl-C end it after the current step with a checkpoint; of several
    processes one that receives it is enough, and they stop together a few steps later.

    Args:
      config: the run.
      workdir: its folder, which all processes reach; see `run_folder`.
      text: the gin text that `config` comes from, kept in the folder.
      operative: the part of `text` in force, likewise.
      given: loads `trunk`, and `heads` if they fit too, to begin with instead of random
        ones; called only where the run begins. See `TrainConfig.start`.

    Returns:
      What the last evaluation measured: `validation_loss` and, per head,
      `validation_loss_head_h`, accuracies and entropies; {} if the run was stopped
      before its end or had ended before.

    Raises:
      UserError: the configuration, the folder, the disk or the data do not fit, or the
        loss is no longer finite.
      SystemExit: with 128 + the signal's number, if one ended the run.
    """
    folder = as_path(workdir)
    mesh = make_mesh(config.mesh)
    check_batch(config, mesh)
    optimizer = make_optimizer(config.optimizer, config.steps)
    abstract = abstract_state(config.model, optimizer, mesh, config.compute)
    part, parts = distributed.batch_part(mesh)
    with contextlib.ExitStack() as stack:
        stack.enter_context(peers.watched())

        def make_ready() -> None:
            run_folder.check_usable(folder, config)
            stack.enter_context(locked(folder))
            if max(whole_steps(folder / CHECKPOINTS), default=0) < config.steps:
                check_space(folder / CHECKPOINTS, abstract, config.keep_checkpoints)
            make_run_rows(config, folder)

        distributed.first(make_ready)
        train_rows, validation_rows = open_run_rows(config, folder)
        batches = RowIterator(
            train_rows,
            config.batch_size,
            config.seed,
            process_index=part,
            process_count=parts,
        )
        checkpoints = stack.enter_context(
            Checkpoints(folder / CHECKPOINTS, config.keep_checkpoints)
        )
        start = checkpoints.latest_step or 0
        saved = distributed.agree(checkpoints.restore_data() if start else {})
        selection = Selection.from_json(
            saved.get(_SELECTION), config.select_by, config.lambdas
        ).among(checkpoints.steps())
        schedule = config.head_schedule or HeadSchedule()
        schedule_state = saved.get(_HEAD_SCHEDULE) or schedule.start()
        if start >= config.steps or selection.is_over(config.patience):
            say(_already(folder, start, config, selection))
            return {}
        if start:
            batches.restore(saved)
            state = restore_state(checkpoints, config, optimizer, abstract, mesh)
        else:
            state = init_state(
                config.model, optimizer, abstract, config.seed, config.compute
            )
            if given is not None:
                state = with_parameters(state, given())
        distributed.first(lambda: run_folder.describe(folder, config, text, operative))
        say(describe_run(config, abstract, mesh, train_rows, validation_rows, start))

        step_fn = make_train_step(
            config.model,
            optimizer,
            abstract,
            mesh,
            compute=config.compute,
            settings=config.loss,
        )
        meter = Meter(
            config.tokens_per_step,
            peak=peak_tokens_per_second(
                config.model, config.length, config.anchors_per_row
            ),
        )
        if loop.METER in saved:
            meter.restore(saved[loop.METER])
        evaluate = Evaluator(config, validation_rows, abstract, mesh)
        validation: dict[str, float] = {}

        def update(
            state: TrainState, batch: Batch, step: int
        ) -> tuple[TrainState, Metrics]:
            lambdas = schedule.weights(schedule_state, step, config.lambdas)
            return step_fn(state, put_batch(batch, mesh), lambdas)

        def after(step: int, row: dict[str, float] | None) -> tuple[int | None, bool]:
            nonlocal schedule_state, selection, validation
            if row is not None:
                validation, selection = row, selection.after(step, row)
            entropies = None if row is None else _entropies(row)
            schedule_state = schedule.advance(schedule_state, step, entropies)
            return selection.step, selection.is_over(config.patience)

        def data() -> dict[str, Any]:
            run_state = {
                _SELECTION: selection.to_json(),
                _HEAD_SCHEDULE: schedule_state,
            }
            return batches.state() | run_state

        _, step = loop.run(
            loop.Pace(
                config.steps,
                config.log_every,
                config.evaluate_every,
                config.checkpoint_every,
            ),
            folder,
            checkpoints,
            state,
            start,
            batches=batches,
            update=update,
            evaluate=evaluate,
            data=data,
            rate=learning_rate_schedule(config.optimizer, config.steps),
            meter=meter,
            after=after,
            vote=distributed.StopVote(mesh),
        )
    say(_closing(validation, folder, step, config, selection))
    return validation


def check_batch(config: TrainConfig, mesh: Mesh) -> None:
    """Raises a `UserError` unless the devices can share out a batch."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"] * config.compute.accumulate
    if config.batch_size % parts:
        raise UserError(
            f"TrainConfig.batch_size = {config.batch_size} is not a multiple of "
            f"data × fsdp × ComputeConfig.accumulate = {parts}, the number of parts "
            "that it is split into."
        )


def _entropies(validation: dict[str, float]) -> list[float]:
    return [
        value
        for name, value in validation.items()
        if name.startswith("validation_entropy_head_")
    ]


def _already(
    folder: pathlib.Path, start: int, config: TrainConfig, selection: Selection
) -> str:
    if start >= config.steps:
        return (
            f"already finished: {folder} is at step {start:,}; raise "
            "TrainConfig.steps to train it further."
        )
    return (
        f"already finished: {folder} stopped early at step {start:,}, after "
        f"{selection.waited} evaluations without a better one than the "
        f"{selection}; raise TrainConfig.patience to train it further."
    )


def _closing(
    validation: dict[str, float],
    folder: pathlib.Path,
    step: int,
    config: TrainConfig,
    selection: Selection,
) -> str:
    losses = [
        f"{value:.3f}"
        for name, value in validation.items()
        if name.startswith("validation_loss_head_")
    ]
    ending = "finished" if step == config.steps else f"stopped early at step {step:,}"
    return (
        f"{ending}: validation loss per head {', '.join(losses)} (nats per token), "
        f"{selection}; the run is in {folder}"
    )
