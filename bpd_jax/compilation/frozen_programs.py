"""The programs for training heads or a block drafter on a frozen model."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.compilation.programs import Program, spread
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.model_flops import (
    drafter_train_flops,
    forward_flops,
    heads_train_flops,
)
from bpd_jax.models.partitioning import BATCH_SPEC, row_parts
from bpd_jax.training.frozen import make_step
from bpd_jax.training.heads.batches import PositionBatch
from bpd_jax.training.heads.drafter_batches import BlockBatch
from bpd_jax.training.heads.drafter_objective import DrafterObjective
from bpd_jax.training.heads.frozen_states import read_texts, states_dtype
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.heads.train_heads import make_objective, output_name
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.state import TrainState, abstract_parameters


def frozen_programs(
    config: HeadsTrainConfig, model: BlockwiseConfig, mesh: Mesh
) -> list[Program]:
    """The frozen model's pass over texts, and one training step of what reads it.

    Args:
      config: configuration of the training; its texts and model are not read.
      model: configuration of the frozen model.
      mesh: mesh over the devices.

    Raises:
      UserError: a batch cannot be divided evenly over the mesh.
    """
    config.check_mesh(mesh)
    return [_read_program(config, model, mesh), _step_program(config, model, mesh)]


def _read_program(
    config: HeadsTrainConfig, model: BlockwiseConfig, mesh: Mesh
) -> Program:
    trunk = dataclasses.replace(
        model.trunk, dtype=config.products, param_dtype=config.products
    )
    frozen, length = BlockwiseConfig(trunk), config.row_tokens
    parts = row_parts(mesh)
    rows = -(-max(1, config.forward_tokens // length) // parts) * parts

    def lower() -> jax.stages.Lowered:
        return read_texts.lower(
            BlockwiseLM(frozen, mesh=mesh),
            jnp.dtype(config.states_dtype),
            make_objective(config, model, mesh).layers,
            {"trunk": abstract_parameters(frozen, mesh)["trunk"]},
            spread(np.zeros((rows, length), np.int32), mesh, BATCH_SPEC),
        )

    return Program(
        name="read texts",
        about=f"{rows} × {length} tokens through the frozen model",
        lower=lower,
        tokens=rows * length,
        model_flops=forward_flops(frozen, rows, length),
    )


class _Step(NamedTuple):
    """A training step: a batch, its description, trained positions and FLOPs."""

    batch: Any
    about: str
    positions: int
    model_flops: float


def _step_program(
    config: HeadsTrainConfig, model: BlockwiseConfig, mesh: Mesh
) -> Program:
    objective, trunk = make_objective(config, model, mesh), model.trunk
    width = trunk.d_model * (1 + len(objective.layers))
    if isinstance(objective, DrafterObjective):
        shapes = _blocks(objective, width)
    else:
        shapes = _positions(config, model, width)

    def lower() -> jax.stages.Lowered:
        optimizer = make_optimizer(config.optimizer, config.steps or 1)
        count = config.heads.draft_vocabulary
        vocabulary = None if count is None else np.arange(count, dtype=np.int32)
        trained, frozen = jax.eval_shape(
            lambda params, rng: objective.init(params, vocabulary, rng),
            {"trunk": abstract_parameters(BlockwiseConfig(trunk), mesh)["trunk"]},
            jax.random.key(0),
        )
        moments = jax.eval_shape(optimizer.init, trained)
        step: Any = make_step(objective, optimizer)
        state = TrainState(jnp.int32(0), trained, moments)
        return step.lower(
            spread(state, mesh, PartitionSpec()),
            spread(frozen, mesh, PartitionSpec()),
            spread(shapes.batch, mesh, BATCH_SPEC),
        )

    return Program(
        name=output_name(config),
        about=shapes.about,
        lower=lower,
        tokens=shapes.positions,
        model_flops=shapes.model_flops,
    )


def _blocks(objective: DrafterObjective, width: int) -> _Step:
    config, drafter = objective.config, objective.drafter
    rows, anchors = config.block_rows, config.anchors_per_row
    blocks, states = (rows, anchors, config.block_size), (rows, config.row_tokens)
    return _Step(
        BlockBatch(
            states=np.zeros((*states, width), states_dtype(config.states_dtype)),
            offsets=np.zeros(rows, np.int32),
            anchors=np.zeros((rows, anchors), np.int32),
            tokens=np.zeros(blocks, np.int32),
            valid=np.zeros(blocks, bool),
        ),
        f"{rows} × {anchors} blocks of {config.block_size} tokens, "
        f"{drafter.num_layers} layers",
        rows * anchors,
        drafter_train_flops(objective.functions, *states, anchors),
    )


def _positions(config: HeadsTrainConfig, model: BlockwiseConfig, width: int) -> _Step:
    assert not isinstance(config.heads, BlockDrafterConfig)
    size, dtype = config.batch_size, states_dtype(config.states_dtype)
    teacher, heads = config.soft_targets > 0, BlockwiseConfig(model.trunk, config.heads)
    later = np.zeros((size, config.levels, width), dtype) if teacher else None
    return _Step(
        PositionBatch(
            states=np.zeros((size, width), dtype),
            tokens=np.zeros((size, config.block_size), np.int32),
            valid=np.zeros((size, config.block_size), bool),
            later=later,
        ),
        f"{size:,} positions, heads 2 to {config.block_size}"
        + (", the model's distribution as targets" if teacher else ""),
        size,
        heads_train_flops(heads, size, teacher=teacher),
    )
