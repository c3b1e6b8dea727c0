"""Training a refiner; the model itself stays as it is.

`refiner_sources` says what on. A training takes minutes and does not resume: its folder
appears at the end, or not at all.
"""

import dataclasses
import functools
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bpd_jax import progress
from bpd_jax.errors import UserError
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.refiner_files import HEADER, save_refiner
from bpd_jax.models.refiners import RefinerConfig, init_refiner
from bpd_jax.training import run_folder
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.heads.loss import LevelSums
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.refiner_loss import Frozen, head_sums, refined_sums
from bpd_jax.training.refiner_settings import RefinerSettings
from bpd_jax.training.refiner_sources import Source, open_source
from bpd_jax.typing import Array, Params

_WARMUP = 0.05
_LOG_EVERY = 20


class HeldOut(NamedTuple):
    """Sums over held-out positions for levels 1 … L-1, given the true earlier tokens.

    Attributes:
      plain_text: how the block heads as they are guess the text.
      refined_text: the same heads with the refiner.
      plain_model: how the heads guess the model's own next tokens, which are what
        greedy verification accepts.
      refined_model: the same heads with the refiner.
    """

    plain_text: LevelSums
    refined_text: LevelSums
    plain_model: LevelSums
    refined_model: LevelSums


class Report(NamedTuple):
    """What a training came to.

    Attributes:
      losses: mean over the levels at each step, nats per token.
      held_out: measured at the end.
      seconds: of the steps, compilation included.
    """

    losses: np.ndarray
    held_out: HeldOut
    seconds: float


def train_refiner(
    settings: RefinerSettings,
    model: BlockwiseConfig,
    base: Params,
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    command: str = "",
) -> Report:
    """Trains a refiner and writes its folder, whole or not at all.

    Args:
      settings: what and how.
      model: sizes of the frozen model.
      base: its parameters.
      data: a folder with the packed rows of both splits, `train` and `validation`, or
        with cached states of the model.
      output: folder of the refiner; an older refiner there is replaced.
      command: kept in the folder.

    Raises:
      UserError: settings, model, data or folder do not fit, or the loss is not finite.
    """
    config = settings.config_for(model)
    output = pathlib.Path(output)
    _check_output(output)
    source = open_source(data, settings, model, base)
    start = time.perf_counter()
    params, losses = _train(settings, config, model, base, source)
    seconds = time.perf_counter() - start
    held_out = evaluate(config, params, model, base, source.held_out, source.freeze)
    facts = {
        "command": command,
        "settings": dataclasses.asdict(settings),
        "seconds": round(seconds, 1),
        "held_out": {
            name: [round(value, 5) for value in values]
            for name, values in table(held_out).items()
        },
        "versions": run_folder.versions(),
    }
    save_refiner(output, config, params, facts, fingerprint(model, base))
    return Report(losses, held_out, seconds)


def table(held_out: HeldOut) -> dict[str, list[float]]:
    """Columns over levels 1 … L-1: top-1 accuracy and loss of each kind of sum.

    The loss is the mean over targets in the draft vocabulary; to the accuracy those
    outside are misses.
    """
    columns = {}
    for name, sums in held_out._asdict().items():
        accuracy = sums.correct / np.maximum(sums.valid, 1)
        columns[f"{name}_accuracy"] = accuracy.tolist()
        columns[f"{name}_loss"] = (sums.loss / np.maximum(sums.scored, 1)).tolist()
    return columns


def _train(
    settings: RefinerSettings,
    config: RefinerConfig,
    model: BlockwiseConfig,
    base: Params,
    source: Source,
) -> tuple[Params, np.ndarray]:
    """The steps; returns the parameters and the loss of each step."""
    init_key = jax.random.key(settings.seed)
    params = jax.jit(functools.partial(init_refiner, config))(init_key)
    warmup = math.ceil(_WARMUP * settings.steps)
    optimizer = make_optimizer(
        OptimizerConfig(settings.learning_rate, warmup), settings.steps
    )
    opt_state = optimizer.init(params)
    own = settings.targets == "model"
    step_fn = make_step(config, model, optimizer, source.freeze, own=own)
    waiting: list[tuple[Array, Array]] = []
    losses: list[float] = []
    with progress.bar(label="training", total=settings.steps, unit="step") as bar:
        for step in range(1, settings.steps + 1):
            params, opt_state, metrics = step_fn(
                params, opt_state, base, next(source.train)
            )
            waiting.append(metrics)
            if step % _LOG_EVERY == 0 or step == settings.steps:
                new, accuracies = np.array(jax.device_get(waiting)).T
                waiting = []
                if not np.isfinite(new).all():
                    raise UserError(
                        f"the loss is not finite at step {step}: lower "
                        f"--learning_rate={settings.learning_rate}."
                    )
                losses += new.tolist()
                text = f"loss {new.mean():.3f}, top-1 {accuracies.mean():.1%}"
                bar.set_postfix_str(text, refresh=False)
            bar.update()
    return params, np.array(losses)


def make_step(
    config: RefinerConfig,
    model: BlockwiseConfig,
    optimizer: optax.GradientTransformation,
    freeze: Callable[..., Frozen],
    *,
    own: bool,
) -> Callable[..., tuple[Params, Any, tuple[Array, Array]]]:
    """Builds `(params, opt_state, base, batch) → (params, opt_state, metrics)`.

    The metrics are loss and top-1 accuracy, means over positions, then over levels.
    The first two arguments are consumed. For `freeze` and `own` see `Source`.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, opt_state: Any, base: Params, batch: Any
    ) -> tuple[Params, Any, tuple[Array, Array]]:
        frozen = freeze(model, base, batch, own=own)

        def loss_of(params: Params) -> tuple[Array, Array]:
            sums = refined_sums(config, params, model, base, frozen)
            losses = sums.loss / jnp.maximum(sums.scored, 1)
            accuracies = sums.correct / jnp.maximum(sums.valid, 1)
            return jnp.mean(losses), jnp.mean(accuracies)

        (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, (loss, accuracy)

    return step


def evaluate(
    config: RefinerConfig,
    params: Params,
    model: BlockwiseConfig,
    base: Params,
    batches: Sequence[Any],
    freeze: Callable[..., Frozen],
) -> HeldOut:
    """Sums over held-out batches; see `Source`."""
    total: Any = None
    for batch in progress.bar(batches, label="held out", unit="batch"):
        found = jax.device_get(_measure(config, params, model, base, batch, freeze))
        total = found if total is None else jax.tree.map(np.add, total, found)
    return total


@functools.partial(jax.jit, static_argnames=("config", "model", "freeze"))
def _measure(
    config: RefinerConfig,
    params: Params,
    model: BlockwiseConfig,
    base: Params,
    batch: Any,
    freeze: Callable[..., Frozen],
) -> HeldOut:
    """Sums over one held-out batch."""
    sums = []
    for own in (False, True):
        frozen = freeze(model, base, batch, own=own)
        sums.append(head_sums(model, base, frozen, frozen.states))
        sums.append(refined_sums(config, params, model, base, frozen))
    return HeldOut(*sums)


def _check_output(output: pathlib.Path) -> None:
    """Raises a `UserError` unless a refiner may be written to `output`."""
    if output.is_dir():
        usable = (output / HEADER).exists() or not any(output.iterdir())
    else:
        usable = not output.exists()
    if not usable:
        raise UserError(f"{output} exists and is no refiner: choose another --output.")
    nearest = next(path for path in output.absolute().parents if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(
            f"cannot write {output}: {nearest} is not a folder one can write to."
        )
