"""Training block heads or a block drafter on a frozen model, from texts it wrote.

The model reads every text once; the states are the expensive part and are kept (see
`cache`). The folder of a run holds `states/`, `checkpoint.npz`, `metrics.jsonl`, the
configuration, and at the end `heads/`, which `models.heads_files` reads, or `drafter/`,
which `models.drafter_files` reads. What is trained is an `Objective`.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bpd_jax import files, progress
from bpd_jax.errors import UserError
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.training import run_folder
from bpd_jax.training.heads.base import Base
from bpd_jax.training.heads.checkpoint import load_checkpoint, save_checkpoint
from bpd_jax.training.heads.drafter_objective import DrafterObjective
from bpd_jax.training.heads.heads_objective import HeadsObjective
from bpd_jax.training.heads.held_out import HeldOut, add_up
from bpd_jax.training.heads.objective import Objective
from bpd_jax.training.heads.plan import Plan, describe, identity, make_plan
from bpd_jax.training.heads.settings import HeadsTrainConfig
from bpd_jax.training.metrics import MetricsWriter
from bpd_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bpd_jax.training.signals import noted_signals
from bpd_jax.typing import Array, Params, PyTree

HEADS, DRAFTER, CHECKPOINT = "heads", "drafter", "checkpoint.npz"


def train_heads(
    config: HeadsTrainConfig,
    model: BlockwiseConfig,
    params: Params,
    workdir: str | os.PathLike[str],
    text: str = "",
    operative: str = "",
) -> HeldOut:
    """Trains heads or a block drafter, or resumes the run in `workdir`.

    The result is in `heads/` or `drafter/` there.

    SIGTERM and Ctrl-C end it after the current step with a checkpoint.

    Args:
      config: the run.
      model: sizes of the frozen model; heads that it has do not matter.
      params: its parameters.
      workdir: folder of the run.
      text: the gin text that `config` comes from, kept in the folder.
      operative: the part of `text` in force, likewise.

    Returns:
      What was measured on held-out texts at the end.

    Raises:
      UserError: the texts, the folder or the disk do not fit, or the loss is not
        finite.
      SystemExit: with 128 + the signal's number, if one ended the run.
    """
    folder = pathlib.Path(workdir)
    objective = make_objective(config, model)
    output = folder / output_name(config)
    files.check_writable(output, folder=True)
    plan = make_plan(config, model, params)
    progress.say(describe(config, model, plan))
    trained, frozen = objective.init(params, plan, jax.random.key(config.seed))
    optimizer = make_optimizer(config.optimizer, plan.steps)
    schedule = learning_rate_schedule(config.optimizer, plan.steps)
    key = identity(config, plan)
    step, seconds, (trained, opt_state) = load_checkpoint(
        folder / CHECKPOINT, key, (trained, optimizer.init(trained))
    )
    # What another training left in the folder stays as it is.
    _write_configuration(folder, text, operative)
    base = Base(
        model,
        params,
        config.forward_tokens,
        config.states_dtype,
        objective.layers,
        config.products,
    )
    source, measured, sample = objective.batches(base, plan, folder, step)
    step_fn = make_step(objective, optimizer)
    measure_now = functools.partial(measure, objective, frozen=frozen)
    start = time.perf_counter() - seconds

    def save(step: int, state: PyTree) -> None:
        seconds = time.perf_counter() - start
        save_checkpoint(folder / CHECKPOINT, key, step, seconds, state)

    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(MetricsWriter(folder, step))
        bar = stack.enter_context(
            progress.bar(label="training", total=plan.steps, initial=step, unit="step")
        )
        stop = stack.enter_context(noted_signals())
        waiting: list[dict[str, Array]] = []
        while step < plan.steps and not stop:
            trained, opt_state, metrics = step_fn(
                trained, opt_state, frozen, next(source)
            )
            waiting.append(metrics)
            step += 1
            if step % config.log_every == 0 or step == plan.steps:
                row, waiting = _means(waiting, step), []
                writer.write(step, row | {"learning_rate": float(schedule(step - 1))})
                top = np.mean([v for k, v in row.items() if k.startswith("accuracy")])
                bar.set_postfix_str(f"loss {row['loss']:.3f}, top-1 {top:.1%}", False)
            if step % config.evaluate_every == 0 and step < plan.steps:
                found = measure_now(trained, batches=measured)
                writer.write(step, found.metrics())
            if step % config.checkpoint_every == 0 or step == plan.steps:
                save(step, (trained, opt_state))
            bar.update()
        if step < plan.steps:
            save(step, (trained, opt_state))
            progress.say(
                f"stopped: {folder} is saved at step {step:,} of {plan.steps:,}; run "
                "the same command again to resume."
            )
            sys.exit(128 + stop[0])
        held_out = measure_now(trained, batches=measured)
        writer.write(step, held_out.metrics())
        learnt = measure_now(trained, batches=sample) if sample else None
        if learnt is not None:
            writer.write(step, learnt.metrics("train"))
    objective.save(
        output,
        trained,
        frozen,
        base=plan.base,
        base_name=_name(config.model),
        facts=_facts(config, plan, held_out, learnt, time.perf_counter() - start),
    )
    progress.say(f"accuracy on held-out texts:\n{held_out.table()}")
    progress.say(f"finished: {output} holds what was trained")
    return held_out


def make_objective(config: HeadsTrainConfig, model: BlockwiseConfig) -> Objective:
    """Heads or a block drafter, whichever `config.heads` describes."""
    if isinstance(config.heads, BlockDrafterConfig):
        return DrafterObjective(config, model)
    return HeadsObjective(config, model)


def output_name(config: HeadsTrainConfig) -> str:
    """The folder of the result in that of a run."""
    return DRAFTER if isinstance(config.heads, BlockDrafterConfig) else HEADS


def make_step(
    objective: Objective, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[Params, Any, dict[str, Array]]]:
    """Builds `(trained, opt_state, frozen, batch) → (…, …, metrics)`.

    The metrics are `loss`, `gradient_norm`, and per head `losses` and `accuracies`. The
    first two arguments are consumed.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        trained: Params, opt_state: Any, frozen: Params, batch: PyTree
    ) -> tuple[Params, Any, dict[str, Array]]:
        loss, sums, gradients = objective.loss_and_gradients(trained, frozen, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, trained)
        metrics = {
            "loss": loss,
            "gradient_norm": optax.global_norm(gradients),
            "losses": sums.loss / jnp.maximum(sums.scored, 1),
            "accuracies": sums.correct / jnp.maximum(sums.valid, 1),
        }
        return optax.apply_updates(trained, updates), opt_state, metrics

    return step


def measure(
    objective: Objective, trained: Params, *, frozen: Params, batches: list[PyTree]
) -> HeldOut:
    """Sums over some batches of equal size."""
    parts = (_sums(objective, trained, frozen, batch) for batch in batches)
    return add_up([jax.device_get(part) for part in parts])


@functools.partial(jax.jit, static_argnums=0)
def _sums(
    objective: Objective, trained: Params, frozen: Params, batch: PyTree
) -> HeldOut:
    return objective.held_out_sums(trained, frozen, batch)


def _means(waiting: list[dict[str, Array]], step: int) -> dict[str, float]:
    """One row of metrics: means over some steps."""
    rows: list[dict[str, np.ndarray]] = jax.device_get(waiting)
    mean = {name: np.mean([row[name] for row in rows], axis=0) for name in rows[0]}
    if not np.isfinite(mean["loss"]):
        raise UserError(
            f"the loss is not finite at step {step}: lower "
            "OptimizerConfig.learning_rate."
        )
    values = {name: float(mean[name]) for name in ("loss", "gradient_norm")}
    for name, column in (("loss", "losses"), ("accuracy", "accuracies")):
        for head, value in enumerate(mean[column], start=2):
            values[f"{name}_head_{head}"] = float(value)
    return values


def _facts(
    config: HeadsTrainConfig,
    plan: Plan,
    held_out: HeldOut,
    learnt: HeldOut | None,
    seconds: float,
) -> dict[str, Any]:
    """What the header of the result tells of the training; no folders."""
    settings = dataclasses.asdict(config)
    for name in ("model", "data", "states"):
        del settings[name]
    return {
        **held_out.facts(),
        "train": None if learnt is None else learnt.facts(),
        "texts": len(plan.texts),
        "positions": len(plan.train),
        "held_out_positions": len(plan.held_out),
        "steps": plan.steps,
        "seconds": round(seconds, 1),
        "settings": settings,
        "texts_by": plan.texts.base,
        "versions": run_folder.versions(),
    }


def _write_configuration(folder: pathlib.Path, text: str, operative: str) -> None:
    for name, content in (
        (run_folder.CONFIG, text),
        (run_folder.OPERATIVE, operative),
    ):
        with files.replacing_file(folder / name) as path:
            path.write_text(content, encoding="utf-8")


def _name(model: str) -> str:
    """The name of a model, without the folders that it lies in."""
    return pathlib.Path(model).name
