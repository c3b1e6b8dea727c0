"""Training of a module on a frozen model: heads, block drafters and refiners.

The module is an `Objective`: trained parameters, frozen arrays that it reads, a loss
with gradients, and sums over held-out batches.
"""

import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Params, PyTree
from bpd_jax.models.attachments import by_path
from bpd_jax.models.partitioning import replicated
from bpd_jax.training import hosts, run_folder
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.config import FrozenConfig
from bpd_jax.training.loop import Evaluated, run_steps
from bpd_jax.training.metrics import MetricsWriter
from bpd_jax.training.objective import Objective
from bpd_jax.training.run_log import METER, Meter, RunLog
from bpd_jax.training.run_names import CHECKPOINTS
from bpd_jax.training.state import TrainState, make_optimizer
from bpd_jax.training.step import Metrics, updated


class Batches(NamedTuple):
    """The batches of a training run, named tuples of host arrays.

    Attributes:
      train: endless training batches, beginning at the step at which the run resumes.
      held_out: held-out batches of equal size.
      sample: batches of training positions, evaluated likewise; may be empty.
      unit: what a batch holds `batch_size` of: `positions` or `rows`.
    """

    train: Iterator[Any]
    held_out: Sequence[Any]
    sample: Sequence[Any] = ()
    unit: str = "positions"


class Result(NamedTuple):
    """The result of a training run.

    Attributes:
      sample: sums over batches of training positions; None if there are none.
      seconds: duration of training over all resumed runs, without computing states.
    """

    trained: Params
    held_out: Any
    sample: Any
    seconds: float


def train(
    objective: Objective,
    trained: Params,
    frozen: PyTree,
    batches: Callable[[int], Batches],
    folder: pathlib.Path,
    config: FrozenConfig,
    key: str,
    text: str,
    operative: str,
) -> Result:
    """Trains an objective, or resumes its run in `folder`.

    A signal ends the run after a step with status 128 + its number.

    Args:
      batches: function that makes the batches, given the number of completed steps.
      folder: run folder; `checkpoints/`, the log and the configuration are written
        there.
      config: settings of the run, with `batch_size` and the number of `steps`.
      key: identifies the run; a checkpoint with another key is not resumed.
      text: the gin text of the configuration; `operative` is the operative one.
    """
    steps, batch_size, mesh = config.steps, config.batch_size, objective.mesh
    assert steps is not None
    assert batch_size is not None
    if hosts.count() > 1:
        raise UserError(
            "heads, block drafters and refiners of a frozen model are trained by one "
            "process: start a single one."
        )
    optimizer = make_optimizer(config.optimizer, steps)
    state = TrainState(jnp.int32(0), trained, optimizer.init(trained))
    if mesh is not None:
        state, frozen = jax.device_put((state, frozen), replicated(mesh))
    with (
        hosts.only_writers(folder),
        Checkpoints(folder / CHECKPOINTS) as checkpoints,
    ):
        # ---- Where the run stands

        start: int = checkpoints.latest_step or 0
        saved: dict[str, Any] = {}
        if start:
            saved = checkpoints.restore_data()
            if saved.get("key") != key:
                raise UserError(
                    f"{folder / CHECKPOINTS} belongs to a run with other settings, "
                    "texts or model: remove it to train from the beginning (cached "
                    "states are kept), or choose another folder."
                )
            state = checkpoints.restore(jax.tree.map(_abstract, state))
        # Only now the checkpoint in the folder has turned out to be this run's.
        run_folder.write_configuration(folder, text, operative)
        run_batches = batches(start)
        meter = Meter(batch_size, run_batches.unit, first_head=2)
        if start:
            meter.restore(saved[METER])
        begin = time.perf_counter() - saved.get("seconds", 0.0)
        update = make_step(objective, optimizer)
        sums_over = functools.partial(measure, objective, frozen=frozen)
        if start >= steps:
            held_out = sums_over(state.params, batches=run_batches.held_out)
            return _result(run_batches, state.params, held_out, sums_over, begin)

        sums: list[Any] = []

        def evaluate(step: int, state: TrainState) -> Evaluated:
            sums.append(sums_over(state.params, batches=run_batches.held_out))
            return Evaluated(sums[-1].metrics())

        def save(step: int, state: TrainState) -> None:
            data = {"key": key, "seconds": time.perf_counter() - begin}
            checkpoints.save(step, state, data | {METER: meter.state()})

        _, state = run_steps(
            config,
            state,
            start,
            run_batches.train,
            lambda state, batch: update(state, frozen, batch),
            evaluate,
            save,
            checkpoints,
            RunLog(folder, checkpoints, start, steps, meter),
            mesh,
        )
        result = _result(run_batches, state.params, sums[-1], sums_over, begin)
        if result.sample is not None:
            with MetricsWriter(folder, steps) as writer:
                writer.write(steps, result.sample.metrics("train"))
    return result


def describe(title: str, trained: Params) -> list[str]:
    """Lines with the trained parameters, which may be shapes only."""
    parameters = by_path(trained)
    count = sum(x.size for x in parameters.values())
    return [
        f"{title}, {count:,} parameters",
        *(f"  {name}: {x.dtype}{list(x.shape)}" for name, x in parameters.items()),
    ]


def _result(
    batches: Batches,
    params: Params,
    held_out: Any,
    sums_over: Callable[..., Any],
    begin: float,
) -> Result:
    sample = sums_over(params, batches=batches.sample) if batches.sample else None
    return Result(params, held_out, sample, time.perf_counter() - begin)


def make_step(
    objective: Objective, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Builds the jitted step `(state, frozen, batch) → (state, metrics)`.

    The state is donated. The metrics are those of `step.make_train_step`, without
    head 1.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainState, frozen: PyTree, batch: Any
    ) -> tuple[TrainState, Metrics]:
        gradient = jax.value_and_grad(objective.loss, has_aux=True)
        (loss, sums), gradients = gradient(state.params, frozen, batch)
        means = {
            "loss_heads": sums.loss / jnp.maximum(sums.scored, 1),
            "accuracy_heads": sums.correct / jnp.maximum(sums.valid, 1),
        }
        after, metrics = updated(optimizer, state, loss, gradients)
        return after, means | metrics

    return step


def measure(
    objective: Objective, trained: Params, *, frozen: PyTree, batches: Sequence[Any]
) -> Any:
    """Sums of the objective over held-out batches of equal size."""
    parts = [
        jax.device_get(_sums(objective, trained, frozen, batch)) for batch in batches
    ]
    return jax.tree.map(lambda *column: np.sum(column, axis=0), *parts)


@functools.partial(jax.jit, static_argnums=0)
def _sums(objective: Objective, trained: Params, frozen: PyTree, batch: Any) -> Any:
    return objective.held_out_sums(trained, frozen, batch)


def _abstract(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
