"""Training of a whole model: sets up mesh, data and train state and runs the loop."""

import contextlib
import os
import pathlib
from collections.abc import Callable

import optax
from jax.sharding import Mesh

from bpd_jax.base.typing import Params
from bpd_jax.data.rows import Batch, RowIterator
from bpd_jax.storage import files
from bpd_jax.storage.buckets import as_path
from bpd_jax.training import hosts, loop, run_folder
from bpd_jax.training.checkpoints import FOLDER as CHECKPOINTS
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.decisions import Decisions, Selection
from bpd_jax.training.evaluator import Evaluator
from bpd_jax.training.hosts import print_once
from bpd_jax.training.meter import Meter, peak_tokens_per_second
from bpd_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bpd_jax.training.relayout import restore_state
from bpd_jax.training.run_description import describe_run
from bpd_jax.training.run_folder import make_run_rows, open_run_rows
from bpd_jax.training.slices import make_mesh
from bpd_jax.training.state import (
    TrainState,
    abstract_state,
    init_state,
    with_parameters,
)
from bpd_jax.training.step import Metrics, make_train_step, put_batch


def train(
    config: TrainConfig,
    workdir: str | os.PathLike[str],
    text: str = "",
    operative: str = "",
    load_start: Callable[[], Params] | None = None,
) -> dict[str, float]:
    """Trains a model, or resumes the run in `workdir`.

    SIGTERM and Ctrl-C end the run after the current step with a checkpoint. In a run of
    several processes it is enough that one of them receives the signal: all stop
    together a few steps later.

    Args:
      config: settings of the run.
      workdir: run folder, which all processes can access; see `run_folder`.
      text: the gin text of `config`, written to the folder.
      operative: the operative gin configuration, likewise.
      load_start: returns initial parameters `trunk`, and `heads` if they fit too;
        called only if the run starts from the beginning. See `TrainConfig.start`.

    Returns:
      The metrics of the last evaluation: `validation_loss` and, per head,
      `validation_loss_head_h`, accuracies and entropies; {} if the run had already
      finished.

    Raises:
      UserError: the configuration, the folder, the disk space or the data are
        unsuitable, or the loss is not finite.
      SystemExit: with code 128 + the number of the signal that ended the run.
    """
    folder = as_path(workdir)
    mesh = make_mesh(config.mesh)
    hosts.check_joined()
    config.check_mesh(mesh)
    optimizer = make_optimizer(config.optimizer, config.steps)
    abstract = abstract_state(config.model, optimizer, mesh, config.compute)
    part, parts = hosts.batch_part(mesh)
    with contextlib.ExitStack() as stack:
        hosts.first(lambda: _prepare_folder(folder, config))
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
        saved = hosts.agree(checkpoints.restore_data() if start else {})
        decisions = Decisions.restore(config, saved, checkpoints.steps())
        if start >= config.steps or decisions.is_over:
            print_once(_already_finished(folder, start, config, decisions.selection))
            return {}
        if start:
            batches.restore(saved)
            state = restore_state(checkpoints, config, optimizer, abstract, mesh)
        else:
            state = _initial_state(config, optimizer, abstract, load_start)
        hosts.first(lambda: run_folder.write_run_files(folder, config, text, operative))
        print_once(
            describe_run(config, abstract, mesh, train_rows, validation_rows, start)
        )
        peak = peak_tokens_per_second(config.model, config.length, config.drawn_per_row)
        meter = Meter(config.tokens_per_step, peak=peak)
        if loop.METER in saved:
            meter.restore(saved[loop.METER])
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
            update=_make_update(config, optimizer, abstract, mesh, decisions),
            evaluate=Evaluator(config, validation_rows, abstract, mesh),
            data=lambda: batches.state() | decisions.to_json(),
            rate=learning_rate_schedule(config.optimizer, config.steps),
            meter=meter,
            after=decisions.after,
        )
    print_once(_summary(decisions, folder, step))
    return decisions.validation


def _prepare_folder(folder: pathlib.Path, config: TrainConfig) -> None:
    """Checks the run folder and prepares its rows."""
    run_folder.check_usable(folder, config)
    files.check_writable(folder / CHECKPOINTS, folder=True)
    make_run_rows(config, folder)


def _initial_state(
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    load_start: Callable[[], Params] | None,
) -> TrainState:
    """The state before the first step; `load_start` is that of `train`."""
    state = init_state(config.model, optimizer, abstract, config.seed, config.compute)
    return state if load_start is None else with_parameters(state, load_start())


def _make_update(
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    mesh: Mesh,
    decisions: Decisions,
) -> Callable[[TrainState, Batch, int], tuple[TrainState, Metrics]]:
    """The update of one step, for a batch of this process; see `loop.run`."""
    step_fn = make_train_step(
        config.model, optimizer, abstract, mesh, config.compute, config.loss
    )

    def update(
        state: TrainState, batch: Batch, step: int
    ) -> tuple[TrainState, Metrics]:
        return step_fn(state, put_batch(batch, mesh), decisions.lambdas(step))

    return update


def _already_finished(
    folder: pathlib.Path, start: int, config: TrainConfig, selection: Selection
) -> str:
    if start >= config.steps:
        return (
            f"already finished: {folder} is at step {start:,}; raise "
            "TrainConfig.steps to train it further."
        )
    return (
        f"already finished: {folder} stopped early at step {start:,}, after "
        f"{selection.waited} evaluations without an improvement on the "
        f"{selection}; raise TrainConfig.patience to train it further."
    )


def _summary(decisions: Decisions, folder: pathlib.Path, step: int) -> str:
    losses = [
        f"{value:.3f}"
        for name, value in decisions.validation.items()
        if name.startswith("validation_loss_head_")
    ]
    is_last = step == decisions.config.steps
    ending = "finished" if is_last else f"stopped early at step {step:,}"
    return (
        f"{ending}: validation loss per head {', '.join(losses)} (nats per token), "
        f"{decisions.selection}; the run is in {folder}"
    )
