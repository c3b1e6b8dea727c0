"""Training of a module on a frozen model: heads, block drafters and refiners.

The module is an `Objective`: trained parameters, frozen arrays that it reads, a loss
with gradients, and sums over held-out batches. `loop` runs the steps.
"""

import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Bool, Float, Params, PyTree
from bpd_jax.models.partitioning import replicated
from bpd_jax.training import loop
from bpd_jax.training.checkpoints import FOLDER as CHECKPOINTS
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.draft_targets import Targets
from bpd_jax.training.meter import Meter
from bpd_jax.training.metrics import MetricsWriter
from bpd_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bpd_jax.training.state import TrainState
from bpd_jax.training.step import Metrics, put_batch, updated


class LevelSums(NamedTuple):
    """Sums over positions for heads 2 … L; they add up over batches.

    Attributes:
      loss: −log p of the targets in the draft vocabulary.
      correct: targets that the head ranks first.
      scored: targets in the draft vocabulary.
      valid: all targets; those outside the draft vocabulary are misses.
    """

    loss: Float[Array, " levels"]
    correct: Float[Array, " levels"]
    scored: Float[Array, " levels"]
    valid: Float[Array, " levels"]

    @classmethod
    def of(
        cls,
        losses: Float[Array, "n levels"],
        hits: Bool[Array, "n levels"],
        targets: Targets,
    ) -> "LevelSums":
        """The sums of n positions.

        Args:
          losses: −log p of each target.
          hits: whether the head ranks the target first.
          targets: the targets.
        """
        scored = targets.scored
        return cls(
            jnp.sum(losses, axis=0, where=scored),
            jnp.sum(hits & scored, axis=0, dtype=jnp.float32),
            scored.sum(0, dtype=jnp.float32),
            targets.valid.sum(0, dtype=jnp.float32),
        )


class Objective(Protocol):
    """A training objective: a frozen dataclass, static under jit."""

    def loss(
        self, trained: Params, frozen: PyTree, batch: Any
    ) -> tuple[Array, LevelSums]:
        """The loss of a batch, and the sums for the metrics."""
        ...

    def held_out_sums(self, trained: Params, frozen: PyTree, batch: Any) -> Any:
        """Sums over a held-out batch: a named tuple with a method `metrics(prefix)`."""
        ...


class Batches(NamedTuple):
    """The batches of a training run, named tuples of host arrays.

    Attributes:
      train: endless training batches, beginning at the step at which the run resumes.
      held_out: held-out batches of equal size.
      sample: batches of training positions, evaluated likewise; may be empty.
    """

    train: Iterator[Any]
    held_out: Sequence[Any]
    sample: Sequence[Any] = ()


class Result(NamedTuple):
    """The result of a training run.

    Attributes:
      trained: parameters.
      held_out: sums over held-out batches.
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
    *,
    key: str,
    optimizer: OptimizerConfig,
    pace: loop.Pace,
    meter: Meter,
    ready: Callable[[], None] = lambda: None,
    learning_rate: str = "OptimizerConfig.learning_rate",
    mesh: Mesh | None = None,
) -> Result:
    """Trains an objective, or resumes its run in `folder`.

    Args:
      objective: the objective.
      trained: initial values of its parameters.
      frozen: arrays that it reads.
      batches: function that makes the batches, given the number of completed steps.
      folder: run folder; `checkpoints/` and the log are written there.
      key: identifies the run; a checkpoint with another key is not resumed.
      optimizer: optimizer of the trained parameters.
      pace: length and intervals of the run.
      meter: averages the metrics for the log.
      ready: called before the first step, after the key of the checkpoint was checked.
      learning_rate: name of the learning-rate setting, for error messages.
      mesh: devices over which batches are split; the train state and the frozen
        arrays are replicated. None for one device.

    Raises:
      UserError: the checkpoint is damaged or belongs to another run, the folder is in
        use or cannot be written, or the loss is not finite.
      SystemExit: with code 128 + the number of the signal that ended the run.
    """
    transform = make_optimizer(optimizer, pace.steps)
    state = TrainState(jnp.int32(0), trained, transform.init(trained))
    if mesh is not None:
        state, frozen = jax.device_put((state, frozen), replicated(mesh))
    with Checkpoints(folder / CHECKPOINTS) as checkpoints:
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
            meter.restore(saved[loop.METER])
        ready()
        run_batches = batches(start)
        begin = time.perf_counter() - saved.get("seconds", 0.0)
        step = make_step(objective, transform)

        def update(state: TrainState, batch: Any, _: int) -> tuple[TrainState, Metrics]:
            placed = batch if mesh is None else put_batch(batch, mesh)
            return step(state, frozen, placed)

        sums_over = functools.partial(measure, objective, frozen=frozen)
        params, held_out = state.params, None

        def evaluate(params: Params) -> dict[str, float]:
            nonlocal held_out
            held_out = sums_over(params, batches=run_batches.held_out)
            return held_out.metrics()

        if start < pace.steps:
            params, _ = loop.run(
                pace,
                folder,
                checkpoints,
                state,
                start,
                batches=run_batches.train,
                update=update,
                evaluate=evaluate,
                data=lambda: {"key": key, "seconds": time.perf_counter() - begin},
                rate=learning_rate_schedule(optimizer, pace.steps),
                meter=meter,
                learning_rate=learning_rate,
            )
        else:
            evaluate(params)
        sample = None
        if run_batches.sample:
            sample = sums_over(params, batches=run_batches.sample)
        if sample is not None and start < pace.steps:
            with MetricsWriter(folder, pace.steps) as writer:
                writer.write(pace.steps, sample.metrics("train"))
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
