"""The training of a whole model: all that its loop over steps (`loop`) needs.

What is here:

- one process or several, on any mesh: each reads the rows of its own devices;
- pretraining, or a start from the parameters of another model;
- the loss of all heads (`loss`);
- a log of means, speed and validation (`run_log`), for which the devices seldom wait;
- the best checkpoint, and an early stop (`validation`);
- an exact resumption of a run that was stopped or killed (`checkpoints`).
"""

import os
import pathlib
from collections.abc import Callable

from jax.sharding import Mesh

from bpd_jax.base.typing import Params
from bpd_jax.data.rows import RowIterator
from bpd_jax.models.mesh import make_mesh
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path
from bpd_jax.training import hosts, run_folder
from bpd_jax.training.checkpoints import Checkpoints, restore_state
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.hosts import print_once
from bpd_jax.training.loop import Evaluated, run_steps
from bpd_jax.training.run_description import describe_run
from bpd_jax.training.run_folder import make_run_rows, open_run_rows
from bpd_jax.training.run_log import METER, Meter, RunLog, peak_tokens_per_second
from bpd_jax.training.run_names import CHECKPOINTS
from bpd_jax.training.state import (
    TrainState,
    abstract_state,
    init_state,
    make_optimizer,
    with_parameters,
)
from bpd_jax.training.step import make_train_step
from bpd_jax.training.validation import Decisions, Evaluator, Selection


def train(
    config: TrainConfig,
    workdir: str | os.PathLike[str],
    text: str = "",
    operative: str = "",
    load_start: Callable[[Mesh], Params] | None = None,
) -> dict[str, float]:
    """Trains a model, or resumes the run in `workdir`.

    SIGTERM and Ctrl-C end the run after the current step with a checkpoint. In a run of
    several processes it is enough that one of them receives the signal: all stop
    together a few steps later.

    Args:
      workdir: run folder, which all processes can access; see `run_folder`.
      text: the gin text of `config`, written to the folder.
      operative: the operative gin configuration, likewise.
      load_start: returns initial parameters `trunk`, and `heads` if they fit too, on
        the run's mesh; called only if the run starts from the beginning. See
        `TrainConfig.start`.

    Returns:
      The metrics of the last evaluation: `validation_loss` and, per head,
      `validation_loss_head_h`, accuracies and entropies; {} if the run had already
      finished.
    """
    folder = as_path(workdir)

    # ---- Devices, and the shapes and shardings of all arrays

    mesh = make_mesh(config.mesh)
    hosts.check_joined()
    config.check_mesh(mesh)
    optimizer = make_optimizer(config.optimizer, config.steps)
    abstract = abstract_state(config.model, optimizer, mesh, config.compute)

    # ---- Data: each process reads the rows of its own devices

    hosts.first(lambda: _prepare_folder(folder, config))
    train_rows, validation_rows = open_run_rows(config, folder)
    part, parts = hosts.batch_part(mesh)
    batches = RowIterator(
        train_rows,
        config.batch_size,
        config.seed,
        process_index=part,
        process_count=parts,
    )
    with (
        hosts.only_writers(folder),
        Checkpoints(folder / CHECKPOINTS, config.keep_checkpoints) as checkpoints,
    ):
        # ---- The train state: from the newest checkpoint, or new

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
            state = init_state(
                config.model, optimizer, abstract, config.seed, config.compute
            )
            if load_start is not None:
                state = with_parameters(state, load_start(mesh))
        hosts.first(lambda: run_folder.write_run_files(folder, config, text, operative))
        print_once(
            describe_run(config, abstract, mesh, train_rows, validation_rows, start)
        )

        # ---- What a step, an evaluation and a save compute, and the log

        train_step = make_train_step(
            config.loss(mesh), config.lambdas, optimizer, abstract
        )
        evaluate = Evaluator(config, validation_rows, abstract, mesh)
        peak = peak_tokens_per_second(
            config.model, config.length, config.drawn_per_row(config.model)
        )
        meter = Meter(config.tokens_per_step, peak=peak)
        if METER in saved:
            meter.restore(saved[METER])

        def validate(step: int, state: TrainState) -> Evaluated:
            best = decisions.after(step, evaluate(state.params))
            ends = decisions.is_over
            return Evaluated(decisions.validation, best == step or ends, ends)

        def save(step: int, state: TrainState) -> None:
            position = batches.state() | decisions.to_json() | {METER: meter.state()}
            checkpoints.save(step, state, position, decisions.selection.step)

        done, _ = run_steps(
            config,
            state,
            start,
            batches,
            train_step,
            validate,
            save,
            checkpoints,
            RunLog(folder, checkpoints, start, config.steps, meter),
            mesh,
        )
    print_once(_summary(decisions, folder, done))
    return decisions.validation


def _prepare_folder(folder: pathlib.Path, config: TrainConfig) -> None:
    run_folder.check_usable(folder, config)
    files.check_writable(folder / CHECKPOINTS, folder=True)
    make_run_rows(config, folder)


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
