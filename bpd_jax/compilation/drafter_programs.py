"""The programs for training a block drafter on a frozen model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.compilation.programs import Program, spread
from bpd_jax.errors import UserError
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.model_flops import drafter_train_flops, forward_flops
from bpd_jax.models.partitioning import BATCH_SPEC
from bpd_jax.training.frozen import make_step
from bpd_jax.training.heads.base import read_texts
from bpd_jax.training.heads.blocks import BlockBatch
from bpd_jax.training.heads.drafter_objective import DrafterObjective
from bpd_jax.training.heads.settings import HeadsTrainConfig
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.state import TrainState, abstract_parameters


def drafter_programs(
    config: HeadsTrainConfig, model: BlockwiseConfig, mesh: Mesh
) -> list[Program]:
    """The frozen model's pass over texts, and one training step of the drafter.

    Args:
      config: configuration of the training; its texts and model are not read.
      model: configuration of the frozen model.
      mesh: mesh over the devices.

    Raises:
      UserError: heads are trained, or a batch cannot be divided evenly over the mesh.
    """
    if not isinstance(config.heads, BlockDrafterConfig):
        raise UserError(
            "--program=drafter needs a gin file that trains a block drafter, such as "
            "gin_configs/runs/drafter.gin."
        )
    config.check_mesh(mesh)
    return [_read_program(config, model, mesh), _step_program(config, model, mesh)]


def _read_program(
    config: HeadsTrainConfig, model: BlockwiseConfig, mesh: Mesh
) -> Program:
    trunk = dataclasses.replace(
        model.trunk, dtype=config.products, param_dtype=config.products
    )
    frozen, length = BlockwiseConfig(trunk), config.row_tokens
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = -(-max(1, config.forward_tokens // length) // parts) * parts

    def lower() -> jax.stages.Lowered:
        return read_texts.lower(
            BlockwiseLM(frozen, mesh=mesh),
            jnp.dtype(config.states_dtype),
            DrafterObjective(config, model).layers,
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


def _step_program(
    config: HeadsTrainConfig, model: BlockwiseConfig, mesh: Mesh
) -> Program:
    objective, trunk = DrafterObjective(config, model), model.trunk
    drafter, anchors = objective.drafter, config.anchors_per_row
    rows = config.batch_size // anchors

    def lower() -> jax.stages.Lowered:
        optimizer = make_optimizer(config.optimizer, config.steps or 1)
        trained = jax.eval_shape(objective.functions.init, jax.random.key(0))
        moments = jax.eval_shape(optimizer.init, trained)
        frozen = {
            "softmax": ShapeDtypeStruct(
                (drafter.draft_vocabulary or trunk.vocab_size, trunk.d_model),
                config.products,
            ),
            "embedding": ShapeDtypeStruct(
                (trunk.vocab_size, trunk.d_model), trunk.param_dtype
            ),
        }
        if drafter.draft_vocabulary:
            frozen["vocabulary"] = ShapeDtypeStruct(
                (drafter.draft_vocabulary,), np.int32
            )
        width = trunk.d_model * (1 + len(objective.layers))
        blocks = (rows, anchors, config.block_size)
        states = (rows, config.row_tokens, width)
        batch = BlockBatch(
            states=np.zeros(states, jnp.dtype(config.states_dtype)),
            offsets=np.zeros(rows, np.int32),
            anchors=np.zeros((rows, anchors), np.int32),
            tokens=np.zeros(blocks, np.int32),
            valid=np.zeros(blocks, bool),
        )
        step: Any = make_step(objective, optimizer)
        state = TrainState(jnp.int32(0), trained, moments)
        return step.lower(
            spread(state, mesh, PartitionSpec()),
            spread(frozen, mesh, PartitionSpec()),
            spread(batch, mesh, BATCH_SPEC),
        )

    return Program(
        name="drafter",
        about=(
            f"{rows} × {anchors} blocks of {config.block_size} tokens, "
            f"{drafter.num_layers} layers"
        ),
        lower=lower,
        tokens=rows * anchors,
        model_flops=drafter_train_flops(
            objective.functions, rows, config.row_tokens, anchors
        ),
    )
