"""The loop over the steps of a run, of a whole model or of parts of a frozen one."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax.sharding import Mesh

from bpd_jax.models.partitioning import from_own_rows
from bpd_jax.training import hosts
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.config import FrozenConfig, TrainConfig
from bpd_jax.training.run_log import RunLog
from bpd_jax.training.state import TrainState, learning_rate_schedule
from bpd_jax.training.step import Metrics


class Evaluated(NamedTuple):
    """What an evaluation decides.

    Attributes:
      metrics: a row of the log.
      saves: whether this state is saved, because it is the best one or the last.
      ends: whether the run ends here.
    """

    metrics: dict[str, float]
    saves: bool = False
    ends: bool = False


def run_steps(
    config: TrainConfig | FrozenConfig,
    state: TrainState,
    start: int,
    batches: Iterator[Any],
    update: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
    evaluate: Callable[[int, TrainState], Evaluated],
    save: Callable[[int, TrainState], object],
    checkpoints: Checkpoints,
    log: RunLog,
    mesh: Mesh | None,
) -> tuple[int, TrainState]:
    """Trains from step `start` to the last one, or until a signal or an evaluation.

    A signal ends the process after a checkpoint, with the status of shells.

    Args:
      config: the last step, and the steps between rows of the log, evaluations and
        checkpoints; each follows the last step, too.
      batches: those of the steps after `start`: this process's rows.
      update: one step of the optimizer; it may take the memory of the state.
      evaluate, save: called with the number of completed steps and the state.

    Returns:
      The number of completed steps, and the state.
    """
    steps = config.steps
    assert steps is not None
    rate = learning_rate_schedule(config.optimizer, steps)
    done, signal, ends = start, 0, False
    with hosts.deferred_signals() as stop, log:
        for done in range(start + 1, steps + 1):
            # ---- One step of the optimizer

            state, metrics = update(state, from_own_rows(next(batches), mesh))

            # ---- What follows it; the host runs ahead unless it needs the state

            signal, last = stop(done), done == steps
            logs = last or done % config.log_every == 0
            evaluates = last or done % config.evaluate_every == 0
            saves = last or bool(signal) or done % config.checkpoint_every == 0
            log.add(done, metrics, read=logs or evaluates or saves)

            # ---- The log: means since the last row

            if logs:
                log.means(done, float(rate(done - 1)))

            # ---- Held-out data: the best checkpoint, an early stop

            if evaluates:
                result = evaluate(done, state)
                log.evaluation(done, result.metrics)
                saves, ends = saves or result.saves, result.ends

            # ---- A checkpoint, from which the run resumes exactly

            if saves:
                save(done, state)
                log.publish()
            if signal or ends:
                break
        # Signals are still deferred, so that none interrupts the last save.
        checkpoints.wait()
    if signal and done < steps and not ends:
        log.stopped(done, signal)
    return done, state
