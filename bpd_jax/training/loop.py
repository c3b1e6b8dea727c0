"""The loop of every training: steps, metrics, evaluations, checkpoints, signals.

Pretraining and finetuning (`trainer`) and the training of modules on a frozen model
(`frozen`: block heads, block drafters, refiners) share the log, the checkpoints and the
way in which a run that was stopped or killed resumes: with the state, the position in
the data and the running means that it had.
"""

import contextlib
import dataclasses
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import optax

from bpd_jax import progress
from bpd_jax.training import distributed
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.distributed import say
from bpd_jax.training.meter import Meter, short
from bpd_jax.training.metrics import MetricsWriter
from bpd_jax.training.signals import noted_signals
from bpd_jax.training.state import TrainState
from bpd_jax.training.step import Metrics
from bpd_jax.training.watch import FiniteWatch
from bpd_jax.typing import Params

# Name in the data item of a checkpoint.
METER = "meter"


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
    vote: Callable[[bool], bool] = bool,
    learning_rate: str = "OptimizerConfig.learning_rate",
) -> tuple[Params, int]:
    """Does the steps from `start` on and saves after the last one.

    SIGTERM and Ctrl-C end the run after the current step with a checkpoint.

    Args:
      pace: length and intervals of the run.
      folder: of the run, for the log.
      checkpoints: of the run.
      state: after `start` steps; it is consumed.
      start: steps done, fewer than `pace.steps`.
      batches: of this process, named tuples of host arrays.
      update: does one step, counted from 1: `(state, batch, step) → (state, metrics)`,
        with the metrics of `step.make_train_step`.
      evaluate: measures parameters on held-out data: a row of metrics, equal in all
        processes.
      data: gives what a checkpoint holds besides the state, as JSON.
      rate: the learning rate, for the log.
      meter: takes the metrics; it was restored if the run resumes.
      after: takes each step and what was measured after it, None where nothing was;
        returns the step of the best checkpoint, which is kept, and whether to stop.
      vote: makes all processes stop together; see `StopVote`.
      learning_rate: name of the setting, for messages.

    Returns:
      The parameters and the step with which the run ended.

    Raises:
      UserError: a checkpoint cannot be written, or the loss is not finite.
      SystemExit: with 128 + the signal's number, if one ended the run.
    """
    with contextlib.ExitStack() as stack:
        watch = FiniteWatch(folder, checkpoints.steps, learning_rate)
        # In the first process only.
        writer = distributed.first(
            lambda: stack.enter_context(MetricsWriter(folder, start))
        )
        # Before the bar appears: from then on a reader expects Ctrl-C to save.
        stop = stack.enter_context(noted_signals())
        bar = stack.enter_context(
            progress.bar(
                label="training",
                total=pace.steps,
                initial=start,
                unit="step",
                disable=not distributed.is_first(),
            )
        )
        for step in range(start + 1, pace.steps + 1):
            batch = next(batches)
            state, metrics = update(state, batch, step)
            meter.add(metrics)
            watch.add(step, batch, metrics)
            stopping = vote(bool(stop))
            last = stopping or step == pace.steps
            logging = step == pace.steps or step % pace.log_every == 0
            evaluating = step == pace.steps or step % pace.evaluate_every == 0
            saving = last or step % pace.checkpoint_every == 0
            watch.check(all_steps=logging or evaluating or saving)
            if logging:
                row = meter.take() | {"learning_rate": float(rate(step - 1))}
                if writer is not None:
                    writer.write(step, row)
                bar.set_postfix_str(short(row), refresh=False)
            validation = None
            if evaluating:
                validation = evaluate(state.params)
                if writer is not None:
                    writer.write(step, validation)
                meter.restart()
            best, enough = after(step, validation)
            if saving or enough or best == step:
                position = data() | {METER: meter.state()}
                checkpoints.save(step, state, position, best)
                if writer is not None:
                    writer.publish()
            bar.update()
            if stopping or enough:
                break
        # While signals are still noted, so that none tears the last save.
        checkpoints.wait()
    if stopping and step < pace.steps and not enough:
        say(
            f"stopped: {folder} is saved at step {step:,} of {pace.steps:,}; run the "
            "same command again to resume."
        )
        # The signal may have been another process's, and not yet be this one's.
        sys.exit(128 + (stop[0] if stop else signal.SIGTERM))
    return state.params, step
