"""The training loop: steps, metrics, evaluations, checkpoints and signals.

Pretraining and finetuning (`trainer`) and the training of modules on a frozen model
(`frozen`: block heads, block drafters, refiners) share the log, the checkpoints and
exact resume: a run that was stopped or killed continues with its train state, its
position in the data and its running means.
"""

import collections
import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import optax
from tqdm import tqdm

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.training import hosts
from bpd_jax.training.checkpoints import FOLDER as CHECKPOINTS
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.meter import Meter, short
from bpd_jax.training.metrics import MetricsWriter
from bpd_jax.training.state import TrainState
from bpd_jax.training.step import Metrics

# Key of the meter's state in the data item of a checkpoint.
METER = "meter"
# Number of steps after which the host reads a result of a step: large enough for the
# device never to wait for the host, and small enough to stop soon.
LAG = 2


@dataclasses.dataclass(frozen=True)
class Pace:
    """The length of a run and its intervals, in steps."""

    steps: int
    log_every: int
    evaluate_every: int
    checkpoint_every: int


def run(
    pace: Pace,
    folder: pathlib.Path,
    checkpoints: Checkpoints,
    state: TrainState,
    start: int,
    *,
    batches: Iterator[Any],
    update: Callable[[TrainState, Any, int], tuple[TrainState, Metrics]],
    evaluate: Callable[[Params], dict[str, float]],
    data: Callable[[], dict[str, Any]],
    rate: optax.Schedule,
    meter: Meter,
    after: Callable[[int, dict[str, float] | None], tuple[int | None, bool]] = (
        lambda step, validation: (None, False)
    ),
    learning_rate: str = "OptimizerConfig.learning_rate",
) -> tuple[Params, int]:
    """Runs the steps after `start` and saves a checkpoint after the last one.

    SIGTERM and Ctrl-C end the run after the current step with a checkpoint.

    Args:
      pace: length and intervals of the run.
      folder: run folder, to which the log is written.
      checkpoints: checkpoints of the run.
      state: train state after `start` steps; its arrays are donated.
      start: number of completed steps, less than `pace.steps`.
      batches: batches of this process, named tuples of host arrays.
      update: runs one step, counted from 1: `(state, batch, step) → (state, metrics)`,
        with the metrics of `step.make_train_step`.
      evaluate: computes a row of metrics on held-out data, equal in all processes.
      data: returns what a checkpoint holds besides the train state, as JSON.
      rate: learning-rate schedule, for the log.
      meter: averages the metrics; already restored if the run resumes.
      after: called after each step with its number and its row of validation metrics,
        or None if there was no evaluation; returns the step of the best checkpoint,
        which is kept, and whether to stop early.
      learning_rate: name of the learning-rate setting, for error messages.

    Returns:
      The final parameters and the last step.

    Raises:
      UserError: a checkpoint cannot be written, or the loss is not finite.
      SystemExit: with code 128 + the number of the signal that ended the run.
    """
    with contextlib.ExitStack() as stack:
        # Steps whose loss the host has not read yet.
        unread: collections.deque[tuple[int, Any]] = collections.deque()
        # Only the first process writes the log.
        writer = hosts.first(lambda: stack.enter_context(MetricsWriter(folder, start)))
        # Installed before the progress bar appears: from then on a user expects Ctrl-C
        # to save a checkpoint.
        stop = stack.enter_context(hosts.deferred_signals())
        bar = stack.enter_context(_progress_bar(pace, start))
        for step in range(start + 1, pace.steps + 1):
            batch = next(batches)
            state, metrics = update(state, batch, step)
            meter.add(metrics)
            unread.append((step, metrics["finite"]))
            stopping = stop(step)
            last = bool(stopping) or step == pace.steps
            logging = step == pace.steps or step % pace.log_every == 0
            evaluating = step == pace.steps or step % pace.evaluate_every == 0
            saving = last or step % pace.checkpoint_every == 0
            # Read late, so that the host does not wait for the device, but before the
            # state is used.
            while len(unread) > (0 if logging or evaluating or saving else LAG):
                number, finite = unread.popleft()
                if not finite:
                    raise _not_finite(number, folder, checkpoints, learning_rate)
            if logging:
                row = meter.take() | {"learning_rate": float(rate(step - 1))}
                if writer:
                    writer.write(step, row)
                bar.set_postfix_str(short(row), refresh=False)
            validation = None
            if evaluating:
                validation = evaluate(state.params)
                if writer:
                    writer.write(step, validation)
                meter.restart()
            best, stop_early = after(step, validation)
            if saving or stop_early or best == step:
                position = data() | {METER: meter.state()}
                checkpoints.save(step, state, position, best)
                if writer:
                    writer.publish()
            bar.update()
            if stopping or stop_early:
                break
        # Signals are still deferred here, so that none interrupts the last save.
        checkpoints.wait()
    if stopping and step < pace.steps and not stop_early:
        _exit_stopped(folder, step, pace, stopping)
    return state.params, step


def _progress_bar(pace: Pace, start: int) -> "tqdm[NoReturn]":
    return progress.bar(
        label="training",
        total=pace.steps,
        initial=start,
        unit="step",
        disable=not hosts.is_first(),
    )


def _not_finite(
    step: int, folder: pathlib.Path, checkpoints: Checkpoints, rate: str
) -> UserError:
    """A step whose loss or gradient norm is not finite has left the state unchanged."""
    newest = max(checkpoints.steps(), default=0)
    resumed = f"checkpoint {newest:,}" if newest else "the beginning"
    return UserError(
        f"the loss or gradient of step {step:,} is not finite: lower {rate} and run "
        f"the same command again, which resumes from {resumed}; if the model has "
        f"already diverged there, remove the newest folder of {folder / CHECKPOINTS}."
    )


def _exit_stopped(folder: pathlib.Path, step: int, pace: Pace, number: int) -> NoReturn:
    """Ends the process after a signal, with the status that shells define for it."""
    hosts.print_once(
        f"stopped: {folder} is saved at step {step:,} of {pace.steps:,}; run the same "
        "command again to resume."
    )
    sys.exit(128 + number)
