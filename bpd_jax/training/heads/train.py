"""Training of block heads or a block drafter for a frozen model, on texts it generated.

The model reads every text once; computing the states is the expensive part, so they are
cached (`states_cache`). A run folder contains `states/`, `checkpoints/`,
`metrics.jsonl`, the configuration, and at the end `heads/`, which `models.heads_files`
reads, or `drafter/`, which `models.drafter_files` reads. The objective is a
`HeadsOrDrafter`.
"""

import dataclasses
import os
import pathlib
from typing import Any

import jax

from bpd_jax import files, progress
from bpd_jax.buckets import as_path
from bpd_jax.models.attachments import VOCABULARY
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.training import frozen, run_folder
from bpd_jax.training.frozen import Batches, Result
from bpd_jax.training.heads.base import Base
from bpd_jax.training.heads.drafter_objective import DrafterObjective
from bpd_jax.training.heads.heads_objective import HeadsObjective
from bpd_jax.training.heads.held_out import HeldOut
from bpd_jax.training.heads.objective import HeadsOrDrafter
from bpd_jax.training.heads.plan import Plan, describe, identity, make_plan
from bpd_jax.training.heads.settings import HeadsTrainConfig
from bpd_jax.training.loop import Pace
from bpd_jax.training.meter import Meter
from bpd_jax.training.slices import make_mesh
from bpd_jax.typing import Params

HEADS, DRAFTER = "heads", "drafter"


def train_heads(
    config: HeadsTrainConfig,
    model: BlockwiseConfig,
    params: Params,
    workdir: str | os.PathLike[str],
    text: str = "",
    operative: str = "",
) -> HeldOut:
    """Trains heads or a block drafter, or resumes the run in `workdir`.

    The result is written to `heads/` or `drafter/` in `workdir`. SIGTERM and Ctrl-C end
    the run after the current step with a checkpoint.

    Args:
      config: settings of the run.
      model: sizes of the frozen model; its heads are not used.
      params: parameters of the frozen model.
      workdir: run folder.
      text: the gin text of `config`, written to the folder.
      operative: the operative gin configuration, likewise.

    Returns:
      The final sums over held-out texts.

    Raises:
      UserError: the texts, the folder or the disk space are unsuitable, or the loss is
        not finite.
      SystemExit: with code 128 + the number of the signal that ended the run.
    """
    folder = as_path(workdir)
    objective = make_objective(config, model)
    output = folder / output_name(config)
    files.check_writable(output, folder=True)
    mesh = None if config.mesh is None else make_mesh(config.mesh)
    if mesh is not None:
        config.check_mesh(mesh)
    plan = make_plan(config, model, params)
    progress.say(describe(config, model, plan))
    trained, frozen_arrays = objective.init(params, plan, jax.random.key(config.seed))

    def batches(step: int) -> Batches:
        base = Base(
            model,
            params,
            config.forward_tokens,
            config.states_dtype,
            objective.layers,
            config.products,
            mesh,
        )
        return objective.batches(base, plan, folder, step)

    result = frozen.train(
        objective,
        trained,
        frozen_arrays,
        batches,
        folder,
        key=identity(config, plan),
        optimizer=config.optimizer,
        pace=Pace(
            plan.steps, config.log_every, config.evaluate_every, config.checkpoint_every
        ),
        meter=Meter(config.batch_size, "positions", first_head=2),
        # Written only after the checkpoint in the folder turned out to be this run's.
        ready=lambda: _write_configuration(folder, text, operative),
        mesh=mesh,
    )
    vocabulary = {k: v for k, v in frozen_arrays.items() if k == VOCABULARY}
    objective.save(
        output,
        {**result.trained, **vocabulary},
        base=plan.base,
        # Without the folders that contain the model.
        base_name=as_path(config.model).name,
        d_model=model.trunk.d_model,
        vocab_size=model.trunk.vocab_size,
        facts=_facts(config, plan, result),
    )
    progress.say(f"accuracy on held-out texts:\n{result.held_out.table()}")
    progress.say(f"finished: the result is in {output}")
    return result.held_out


def make_objective(config: HeadsTrainConfig, model: BlockwiseConfig) -> HeadsOrDrafter:
    """The objective of the heads or of the block drafter in `config.heads`."""
    if isinstance(config.heads, BlockDrafterConfig):
        return DrafterObjective(config, model)
    return HeadsObjective(config, model)


def output_name(config: HeadsTrainConfig) -> str:
    """Name of the folder of the result in a run folder."""
    return DRAFTER if isinstance(config.heads, BlockDrafterConfig) else HEADS


def _facts(config: HeadsTrainConfig, plan: Plan, result: Result) -> dict[str, Any]:
    """The facts about the training in the header of the result, without paths."""
    settings = dataclasses.asdict(config)
    for name in ("model", "data", "states"):
        del settings[name]
    return {
        **result.held_out.facts(),
        "train": None if result.sample is None else result.sample.facts(),
        "texts": len(plan.texts),
        "positions": len(plan.train),
        "held_out_positions": len(plan.held_out),
        "steps": plan.steps,
        "seconds": round(result.seconds, 1),
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
