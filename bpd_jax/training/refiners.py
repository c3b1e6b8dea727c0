"""Training a refiner on the packed rows of a run; the model itself stays as it is.

The model's hidden states are computed on the fly, in the same step. A training takes
minutes and does not resume: its folder appears at the end, or not at all.
"""

import dataclasses
import functools
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bpd_jax import progress
from bpd_jax.data.rows import Batch, PackedRows, RowIterator, open_rows
from bpd_jax.errors import UserError
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.refiner_files import HEADER, save_refiner
from bpd_jax.models.refiners import RefinerConfig, init_refiner
from bpd_jax.training import run_folder
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.loss import HeadSums
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.refiner_loss import head_sums, refined_sums, run_frozen
from bpd_jax.training.refiner_settings import RefinerSettings
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

    plain_text: HeadSums
    refined_text: HeadSums
    plain_model: HeadSums
    refined_model: HeadSums


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
      data: a folder with the packed rows of both splits, `train` and `validation`.
      output: folder of the refiner; an older refiner there is replaced.
      command: kept in the folder.

    Raises:
      UserError: settings, model, rows or folder do not fit, or the loss is not finite.
    """
    config = settings.config_for(model)
    output = pathlib.Path(output)
    _check_output(output)
    train_rows, validation_rows = (
        _open_rows(pathlib.Path(data) / split, model)
        for split in ("train", "validation")
    )
    start = time.perf_counter()
    params, losses = _train(settings, config, model, base, train_rows)
    seconds = time.perf_counter() - start
    held_out = evaluate(
        config,
        params,
        model,
        base,
        validation_rows,
        batch_size=settings.batch_size,
        limit=settings.heldout_rows,
    )
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
    save_refiner(output, config, params, facts)
    return Report(losses, held_out, seconds)


def table(held_out: HeldOut) -> dict[str, list[float]]:
    """Columns over levels 1 … L-1: top-1 accuracy and loss of each kind of sum."""
    columns = {}
    for name, sums in held_out._asdict().items():
        count = np.maximum(sums.valid, 1)
        columns[f"{name}_accuracy"] = (sums.correct / count).tolist()
        columns[f"{name}_loss"] = (sums.loss / count).tolist()
    return columns


def _train(
    settings: RefinerSettings,
    config: RefinerConfig,
    model: BlockwiseConfig,
    base: Params,
    rows: PackedRows,
) -> tuple[Params, np.ndarray]:
    """The steps; returns the parameters and the loss of each step."""
    init_key = jax.random.key(settings.seed)
    params = jax.jit(functools.partial(init_refiner, config))(init_key)
    warmup = math.ceil(_WARMUP * settings.steps)
    optimizer = make_optimizer(
        OptimizerConfig(settings.learning_rate, warmup), settings.steps
    )
    opt_state = optimizer.init(params)
    step_fn = make_step(config, model, optimizer, own=settings.targets == "model")
    batches = RowIterator(rows, settings.batch_size, settings.seed)
    waiting: list[tuple[Array, Array]] = []
    losses: list[float] = []
    with progress.bar(label="training", total=settings.steps, unit="step") as bar:
        for step in range(1, settings.steps + 1):
            params, opt_state, metrics = step_fn(params, opt_state, base, next(batches))
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
    *,
    own: bool,
) -> Callable[..., tuple[Params, Any, tuple[Array, Array]]]:
    """Builds `(params, opt_state, base, batch) → (params, opt_state, metrics)`.

    The metrics are loss and top-1 accuracy, means over positions, then over levels.
    The first two arguments are consumed. For `own` see `run_frozen`.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, opt_state: Any, base: Params, batch: Batch
    ) -> tuple[Params, Any, tuple[Array, Array]]:
        frozen = run_frozen(model, base, batch, own=own)

        def loss_of(params: Params) -> tuple[Array, Array]:
            sums = refined_sums(config, params, model, base, frozen)
            count = jnp.maximum(sums.valid, 1)
            return jnp.mean(sums.loss / count), jnp.mean(sums.correct / count)

        (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, (loss, accuracy)

    return step


def evaluate(
    config: RefinerConfig,
    params: Params,
    model: BlockwiseConfig,
    base: Params,
    rows: PackedRows,
    *,
    batch_size: int,
    limit: int,
) -> HeldOut:
    """Sums over at most `limit` rows, spread evenly over all of them."""

    @jax.jit
    def measure(params: Params, base: Params, batch: Batch) -> HeldOut:
        sums = []
        for own in (False, True):
            frozen = run_frozen(model, base, batch, own=own)
            sums.append(head_sums(model, base, frozen, frozen.states))
            sums.append(refined_sums(config, params, model, base, frozen))
        return HeldOut(*sums)

    count = min(limit, len(rows))
    picked = np.arange(count) * len(rows) // count
    total: Any = None
    for first in progress.bar(
        range(0, count, batch_size), label="held out", unit="batch"
    ):
        batch = rows.batch(picked[first : first + batch_size])
        missing = batch_size - len(batch.tokens)
        batch = Batch(*(np.pad(x, ((0, missing), (0, 0))) for x in batch))
        found = jax.device_get(measure(params, base, batch))
        total = found if total is None else jax.tree.map(np.add, total, found)
    return total


def _open_rows(folder: pathlib.Path, model: BlockwiseConfig) -> PackedRows:
    rows = open_rows(folder)
    if not len(rows):
        raise UserError(f"{folder} holds no rows.")
    if rows.vocab_size != model.trunk.vocab_size:
        raise UserError(
            f"{folder} is of a vocabulary of {rows.vocab_size} tokens and the model of "
            f"{model.trunk.vocab_size}: give the rows that the model was trained on."
        )
    if rows.length > model.trunk.max_length:
        raise UserError(
            f"{folder} has rows of {rows.length} tokens but the model holds "
            f"{model.trunk.max_length}: give shorter rows."
        )
    return rows


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
