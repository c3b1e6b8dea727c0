"""Training of block heads or a block drafter for a frozen model, on texts it generated.

The model reads every text once; computing the states is the expensive part, so they are
cached (`states_cache`). A run folder contains `states/`, `checkpoints/`,
`metrics.jsonl`, the configuration, and at the end `heads/` or `drafter/`, which
`models.attachment_files` reads.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.models.attachment_files import (
    LoadedDrafter,
    LoadedHeads,
    load_drafter,
    load_heads,
)
from bpd_jax.models.attachments import VOCABULARY, by_path
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.mesh import make_mesh
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path, work_place
from bpd_jax.training import frozen, run_folder
from bpd_jax.training.frozen import Batches, Result
from bpd_jax.training.heads.batches import (
    Ring,
    held_out_states,
    ring_batches,
    split_evenly,
    with_targets,
)
from bpd_jax.training.heads.drafter_objective import DrafterObjective
from bpd_jax.training.heads.frozen_states import FrozenModel
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.heads.heads_objective import HeadsObjective
from bpd_jax.training.heads.positions import training_sample
from bpd_jax.training.heads.run_plan import Plan, describe, identity, make_plan
from bpd_jax.training.heads.states_cache import STATES, cached_states
from bpd_jax.training.objective import HeldOut
from bpd_jax.training.state import bytes_per_device

HEADS, DRAFTER = "heads", "drafter"

# Texts that are added to a ring at a time.
_GROUP = 32
# Parts of a block drafter that a later run can add.
_OPTIONAL = ("markov/", "confidence/")


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
    the run after the current step with a checkpoint. The model's own heads are not
    used. `text` is the gin text of `config` and `operative` the operative one, for the
    folder. Returns the final sums over held-out texts.
    """
    config = config.for_model(model.trunk)
    folder = as_path(workdir)
    output = folder / output_name(config)
    files.check_writable(output, folder=True)
    mesh = None if config.mesh is None else make_mesh(config.mesh)
    objective = make_objective(config, model, mesh)
    if mesh is not None:
        config.check_mesh(mesh)
    plan = make_plan(config, model, params)
    rng = jax.random.key(config.seed)
    trained, frozen_arrays = objective.init(params, plan.vocabulary, rng)
    progress.say(describe(config, model, plan, trained))
    start: LoadedHeads | LoadedDrafter | None = None
    if config.start is not None:
        start = (load_drafter if config.trains_drafter else load_heads)(config.start)
        trained = _with_parameters(trained, start, plan)

    def batches(step: int) -> Batches:
        base = FrozenModel(
            model,
            params,
            config.forward_tokens,
            config.states_dtype,
            objective.layers,
            config.products,
            mesh,
        )
        if config.mode == "ring":
            return _ring_batches(config, plan, base, step)
        states = cached_states(
            config.states or work_place(folder / STATES),
            plan.texts,
            base,
            plan.base,
            # A block drafter reads the states of prompts too.
            include_prompts=config.include_prompts or config.trains_drafter,
        )
        batcher = objective.batcher(states, plan.positions)
        sample = training_sample(plan.train, plan.held_out)
        return Batches(
            batcher.batches(plan.train, config.seed, step),
            batcher.held_out(plan.held_out),
            batcher.held_out(sample),
        )

    result = frozen.train(
        objective,
        trained,
        frozen_arrays,
        batches,
        folder,
        dataclasses.replace(config, steps=plan.steps),
        identity(config, plan),
        text,
        operative,
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
        facts=_facts(config, plan, result, start),
    )
    progress.say(f"accuracy on held-out texts:\n{result.held_out.table()}")
    progress.say(f"finished: the result is in {output}")
    return result.held_out


def preview(
    config: HeadsTrainConfig,
    model: BlockwiseConfig,
    params: Params,
    mesh: Mesh | None = None,
) -> str:
    """The description that `train_heads` prints before it trains, and the mesh."""
    config = config.for_model(model.trunk)
    plan, objective = make_plan(config, model, params), make_objective(config, model)
    trained, _ = jax.eval_shape(
        lambda: objective.init(params, plan.vocabulary, jax.random.key(0))
    )
    lines = [describe(config, model, plan, trained)]
    if mesh is not None:
        size = bytes_per_device(params) / 1e6
        lines.append(f"mesh: {dict(mesh.shape)}, {size:,.2f} MB of the model each")
    return "\n".join(lines)


def _ring_batches(
    config: HeadsTrainConfig, plan: Plan, base: FrozenModel, step: int
) -> Batches:
    """Batches of heads from states in memory."""
    positions, block = plan.positions, config.block_size
    states = held_out_states(plan.texts, positions, plan.held_out, base)
    ring = Ring(
        plan.texts,
        positions,
        np.unique(positions.rows[plan.train]),
        base,
        capacity=config.ring_positions,
        group=_GROUP,
        # A resumed run reads the texts in another order.
        seed=config.seed + step,
    )
    return Batches(
        ring_batches(ring, positions, config.batch_size, block, config.ring_uses),
        split_evenly(
            with_targets(positions, plan.held_out, states, block), config.batch_size
        ),
    )


def make_objective(
    config: HeadsTrainConfig, model: BlockwiseConfig, mesh: Mesh | None = None
) -> HeadsObjective | DrafterObjective:
    kind = DrafterObjective if config.trains_drafter else HeadsObjective
    return kind(config, model, mesh)


def output_name(config: HeadsTrainConfig) -> str:
    """Name of the folder of the result in a run folder."""
    return DRAFTER if config.trains_drafter else HEADS


def _with_parameters(
    trained: Params, start: LoadedHeads | LoadedDrafter, plan: Plan
) -> Params:
    """The parameters of `start`, structured like `trained`.

    A Markov or confidence head that `start` does not have keeps its initial parameters.
    """
    stored = start.tensors
    initial = by_path(trained)
    added = [
        name for name in initial if name.startswith(_OPTIONAL) and name not in stored
    ]
    differing = [
        name
        for name, leaf in initial.items()
        if name not in added
        and (name not in stored or stored[name].shape != leaf.shape)
    ]
    # These matrices have a row for each token of the draft vocabulary.
    has_rows = any(
        name in initial and name not in added for name in ("markov/output", "softmax")
    )
    theirs, ours = np.asarray(stored.get(VOCABULARY)), np.asarray(plan.vocabulary)
    if has_rows and not np.array_equal(theirs, ours):
        differing.append(VOCABULARY)
    if differing:
        raise UserError(
            f"HeadsTrainConfig.start: {start.folder} differs from this configuration "
            f"in {differing[0]}: use the settings that it was trained with."
        )
    leaves = [
        initial[name] if name in added else jnp.asarray(stored[name])
        for name in initial
    ]
    return jax.tree.unflatten(jax.tree.structure(trained), leaves)


def _facts(
    config: HeadsTrainConfig,
    plan: Plan,
    result: Result,
    start: LoadedHeads | LoadedDrafter | None,
) -> dict[str, Any]:
    """The facts about the training in the header of the result, without paths."""
    settings = dataclasses.asdict(config)
    for name in ("model", "data", "states", "start"):
        del settings[name]
    earlier = start and {
        "identity": start.identity,
        **{name: start.facts.get(name) for name in ("positions", "steps", "start")},
    }
    return {
        "start": earlier,
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
