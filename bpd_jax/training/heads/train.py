"""Training block heads on a frozen model, from its states along texts it wrote.

The model reads every text once; the states are the expensive part and are kept (see
`cache`). The folder of a run holds `states/`, `checkpoint.npz`, `metrics.jsonl`, the
configuration, and at the end `heads/`, which `models.heads_files` reads.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bpd_jax import files, progress
from bpd_jax.errors import UserError
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.heads import init_heads, is_trained, softmax_rows
from bpd_jax.models.heads_files import save_heads
from bpd_jax.training import run_folder
from bpd_jax.training.heads.base import Base
from bpd_jax.training.heads.batches import (
    PositionBatch,
    cached_batches,
    measured_batches,
    ring_batches,
)
from bpd_jax.training.heads.cache import cached_states
from bpd_jax.training.heads.checkpoint import load_checkpoint, save_checkpoint
from bpd_jax.training.heads.loss import draft_targets, loss_and_gradients
from bpd_jax.training.heads.measure import HeldOut, measure
from bpd_jax.training.heads.plan import Plan, describe, identity, make_plan
from bpd_jax.training.heads.ring import Ring
from bpd_jax.training.heads.settings import HeadsTrainConfig
from bpd_jax.training.metrics import MetricsWriter
from bpd_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bpd_jax.training.signals import noted_signals
from bpd_jax.typing import Array, Params, PyTree

HEADS, STATES, CHECKPOINT = "heads", "states", "checkpoint.npz"

# Texts that a ring reads at a time.
_GROUP = 32


def train_heads(
    config: HeadsTrainConfig,
    model: BlockwiseConfig,
    params: Params,
    workdir: str | os.PathLike[str],
    text: str = "",
    operative: str = "",
) -> HeldOut:
    """Trains heads, or goes on with the run in `workdir`, and writes `heads/` there.

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
    files.check_writable(folder / HEADS, folder=True)
    plan = make_plan(config, model, params)
    print(describe(config, model, plan), flush=True)
    heads = init_heads(
        model, params, config.heads, jax.random.key(config.seed), plan.vocabulary
    )
    trained = {k: v for k, v in heads.items() if is_trained(config.heads, k)}
    fixed = {k: v for k, v in heads.items() if k not in trained}
    matrix = None
    if not config.heads.own_softmax:
        matrix = fixed.get("softmax", softmax_rows(model, params, None))
        matrix = jnp.asarray(matrix, config.products)
    optimizer = make_optimizer(config.optimizer, plan.steps)
    schedule = learning_rate_schedule(config.optimizer, plan.steps)
    key = identity(config, plan)
    step, seconds, (trained, opt_state) = load_checkpoint(
        folder / CHECKPOINT, key, (trained, optimizer.init(trained))
    )
    # What another training left in the folder stays as it is.
    _write_configuration(folder, text, operative)
    source, measured = _batches(config, model, params, plan, folder, step)
    step_fn = make_step(config, model.trunk.vocab_size, optimizer)
    measure_now = functools.partial(
        measure,
        config.heads,
        matrix=matrix,
        vocab_size=model.trunk.vocab_size,
        batches=measured,
        products=config.products,
    )
    vocabulary = fixed.get("vocabulary")
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
                trained, opt_state, matrix, vocabulary, next(source)
            )
            waiting.append(metrics)
            step += 1
            if step % config.log_every == 0 or step == plan.steps:
                row, waiting = _means(waiting, step), []
                writer.write(step, row | {"learning_rate": float(schedule(step - 1))})
                top = np.mean([v for k, v in row.items() if k.startswith("accuracy")])
                bar.set_postfix_str(f"loss {row['loss']:.3f}, top-1 {top:.1%}", False)
            if step % config.evaluate_every == 0 and step < plan.steps:
                writer.write(step, measure_now({**trained, **fixed}).metrics())
            if step % config.checkpoint_every == 0 or step == plan.steps:
                save(step, (trained, opt_state))
            bar.update()
        if step < plan.steps:
            save(step, (trained, opt_state))
            print(
                f"stopped: {folder} is saved at step {step:,} of {plan.steps:,}; run "
                "the same command again to go on."
            )
            sys.exit(128 + stop[0])
        heads = {**trained, **fixed}
        held_out = measure_now(heads)
        writer.write(step, held_out.metrics())
    save_heads(
        folder / HEADS,
        config.heads,
        heads,
        base=plan.base,
        base_name=_name(config.model),
        d_model=model.trunk.d_model,
        vocab_size=model.trunk.vocab_size,
        facts=_facts(config, plan, held_out, time.perf_counter() - start),
        dtype=config.heads_dtype,
    )
    print(f"accuracy on held-out texts:\n{held_out.table()}")
    print(f"finished: the heads are in {folder / HEADS}")
    return held_out


def make_step(
    config: HeadsTrainConfig, vocab_size: int, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[Params, Any, dict[str, Array]]]:
    """Builds `(trained, opt_state, matrix, vocabulary, batch) → (…, …, metrics)`.

    The metrics are `loss`, `gradient_norm`, and per head `losses` and `accuracies`. The
    first two arguments are consumed.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        trained: Params,
        opt_state: Any,
        matrix: Array | None,
        vocabulary: Array | None,
        batch: PositionBatch,
    ) -> tuple[Params, Any, dict[str, Array]]:
        tokens, valid = (jnp.asarray(x)[:, 1:] for x in (batch.tokens, batch.valid))
        targets = draft_targets(tokens, valid, vocabulary, vocab_size)
        loss, sums, gradients = loss_and_gradients(
            config.heads,
            trained,
            matrix,
            jnp.asarray(batch.states),
            targets,
            config.lambdas,
            later=None if batch.later is None else jnp.moveaxis(batch.later, 1, 0),
            soft_targets=config.soft_targets,
            products=config.products,
        )
        updates, opt_state = optimizer.update(gradients, opt_state, trained)
        metrics = {
            "loss": loss,
            "gradient_norm": optax.global_norm(gradients),
            "losses": sums.loss / jnp.maximum(sums.scored, 1),
            "accuracies": sums.correct / jnp.maximum(sums.valid, 1),
        }
        return optax.apply_updates(trained, updates), opt_state, metrics

    return step


def _batches(
    config: HeadsTrainConfig,
    model: BlockwiseConfig,
    params: Params,
    plan: Plan,
    folder: pathlib.Path,
    step: int,
) -> tuple[Iterator[PositionBatch], list[PositionBatch]]:
    """Batches to train on from `step` on, and those to measure on."""
    base = Base(model, params, config.forward_tokens, config.states_dtype)
    size, block = config.batch_size, config.heads.num_heads
    positions = plan.positions
    if config.mode == "cache":
        states = cached_states(
            config.states or folder / STATES,
            plan.texts,
            base,
            plan.base,
            include_prompts=config.include_prompts,
        )
        found = states.read(plan.held_out)
        source = cached_batches(
            states,
            plan.train,
            size,
            block,
            config.seed,
            step,
            later=config.soft_targets > 0,
        )
    else:
        found = _read_states(plan, base)
        ring = Ring(
            plan.texts,
            positions,
            np.unique(positions.rows[plan.train]),
            base,
            capacity=config.ring_positions,
            group=_GROUP,
            # A run that goes on reads the texts in another order.
            seed=config.seed + step,
        )
        source = ring_batches(ring, positions, size, block, config.ring_uses)
    return source, measured_batches(positions, plan.held_out, found, size, block)


def _read_states(plan: Plan, base: Base) -> np.ndarray:
    """States of the held-out positions, computed now and kept in memory."""
    positions, texts = plan.positions, plan.texts
    found = np.empty((len(plan.held_out), base.width), base.dtype)
    rows = np.unique(positions.rows[plan.held_out])
    for number, states in base.states([texts[row] for row in rows]):
        mine = np.flatnonzero(positions.rows[plan.held_out] == rows[number])
        places = positions.places[plan.held_out[mine]] - texts.offsets[rows[number]]
        found[mine] = states[places]
    return found


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
    config: HeadsTrainConfig, plan: Plan, held_out: HeldOut, seconds: float
) -> dict[str, Any]:
    """What `heads.json` tells of the training; no folders of this machine."""
    settings = dataclasses.asdict(config)
    for name in ("model", "data", "states"):
        del settings[name]
    return {
        "accuracies": held_out.accuracies,
        "top": held_out.tops(),
        "loss": held_out.losses,
        "coverage": held_out.coverage,
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
