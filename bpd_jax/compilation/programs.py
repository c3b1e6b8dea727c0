"""The programs to compile: jitted functions with the shapes of their arguments."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax.base.settings import changed_settings
from bpd_jax.base.typing import PyTree
from bpd_jax.data.rows import Batch
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.model_flops import (
    drafter_train_flops,
    forward_flops,
    heads_train_flops,
    train_flops,
)
from bpd_jax.models.parameters import abstract_parameters
from bpd_jax.models.partitioning import BATCH_SPEC, row_parts
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.frozen import make_step
from bpd_jax.training.heads.batches import PositionBatch
from bpd_jax.training.heads.drafter_batches import BlockBatch
from bpd_jax.training.heads.drafter_objective import DrafterObjective
from bpd_jax.training.heads.frozen_states import read_texts, states_dtype
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.heads.heads_objective import BaseObjective, HeadsObjective
from bpd_jax.training.heads.train_heads import make_objective, output_name
from bpd_jax.training.run_description import predictors
from bpd_jax.training.state import TrainState, abstract_state, make_optimizer
from bpd_jax.training.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile.

    Attributes:
      name: `train`, `decode`, …
      about: a short description of its sizes.
      mesh: mesh over the devices that run it.
      lower: traces the program; nothing is allocated.
      model_flops: FLOPs of one run on all devices; see `models.model_flops`.
      reads: bytes of parameters, moments of the optimizer and cache on one device.
    """

    name: str
    about: str
    mesh: Mesh
    lower: Callable[[], jax.stages.Lowered]
    model_flops: float
    reads: int


def train_program(config: TrainConfig, mesh: Mesh) -> Program:
    """One step of a training run, with donated state."""
    config.check_mesh(mesh)
    compute = config.compute
    optimizer = make_optimizer(config.optimizer, config.steps)
    abstract = abstract_state(config.model, optimizer, mesh, compute=compute)

    def lower() -> jax.stages.Lowered:
        step: Any = make_train_step(
            config.loss(mesh), config.lambdas, optimizer, abstract
        )
        ids = np.zeros((config.batch_size, config.length), np.int32)
        batch = Batch(ids, ids, ids, ids.astype(bool))
        return step.lower(abstract, spread(batch, mesh, BATCH_SPEC))

    changed = (f"{name} {value}" for name, value in changed_settings(compute))
    return Program(
        name="train",
        about=(
            f"{config.batch_size} × {config.length} tokens, "
            f"{predictors(config.model)}, {', '.join(changed)}"
        ),
        mesh=mesh,
        lower=lower,
        model_flops=train_flops(
            config.model,
            config.batch_size,
            config.length,
            config.drawn_per_row(config.model),
        ),
        reads=bytes_on_device(abstract),
    )


def frozen_programs(
    config: HeadsTrainConfig, model: BlockwiseConfig, mesh: Mesh
) -> list[Program]:
    """The frozen model's pass over texts, and one training step of what reads it.

    The texts and the model that `config` names are not read.
    """
    config.check_mesh(mesh)
    objective = make_objective(config, model, mesh)
    return [
        _read_program(config, model, mesh, objective.layers),
        _step_program(config, model, mesh, objective),
    ]


def _read_program(
    config: HeadsTrainConfig,
    model: BlockwiseConfig,
    mesh: Mesh,
    layers: tuple[int, ...],
) -> Program:
    trunk = dataclasses.replace(
        model.trunk, dtype=config.products, param_dtype=config.products
    )
    frozen, length = BlockwiseConfig(trunk), config.row_tokens
    parts = row_parts(mesh)
    rows = -(-max(1, config.forward_tokens // length) // parts) * parts
    params = {"trunk": abstract_parameters(frozen, mesh)["trunk"]}
    texts = spread(np.zeros((rows, length), np.int32), mesh, BATCH_SPEC)
    dtype = jnp.dtype(config.states_dtype)
    return Program(
        name="read texts",
        about=f"{rows} × {length} tokens through the frozen model",
        mesh=mesh,
        lower=lambda: read_texts.lower(
            BlockwiseLM(frozen, mesh=mesh), dtype, layers, params, texts
        ),
        model_flops=forward_flops(frozen, rows, length),
        reads=bytes_on_device(params),
    )


def _step_program(
    config: HeadsTrainConfig,
    model: BlockwiseConfig,
    mesh: Mesh,
    objective: BaseObjective,
) -> Program:
    width = model.trunk.d_model * (1 + len(objective.layers))
    dtype, block = states_dtype(config.states_dtype), config.block_size
    batch: PositionBatch | BlockBatch
    if isinstance(objective, DrafterObjective):
        rows, length = config.block_rows, config.row_tokens
        anchors = config.anchors_per_row
        batch = BlockBatch(
            states=np.zeros((rows, length, width), dtype),
            offsets=np.zeros(rows, np.int32),
            anchors=np.zeros((rows, anchors), np.int32),
            tokens=np.zeros((rows, anchors, block), np.int32),
            valid=np.zeros((rows, anchors, block), bool),
        )
        layers = objective.drafter.num_layers
        about = f"{rows} × {anchors} blocks of {block} tokens, {layers} layers"
        flops = drafter_train_flops(objective.functions, rows, length, anchors)
    else:
        assert isinstance(objective, HeadsObjective)
        size, teacher = config.batch_size, config.soft_targets > 0
        later = np.zeros((size, config.levels, width), dtype) if teacher else None
        batch = PositionBatch(
            states=np.zeros((size, width), dtype),
            tokens=np.zeros((size, block), np.int32),
            valid=np.zeros((size, block), bool),
            later=later,
        )
        about = f"{size:,} positions, heads 2 to {block}"
        about += ", the model's distribution as targets" * teacher
        heads = BlockwiseConfig(model.trunk, objective.heads)
        flops = heads_train_flops(heads, size, teacher=teacher)
    optimizer = make_optimizer(config.optimizer, config.steps or 1)
    count = config.heads.draft_vocabulary
    vocabulary = None if count is None else np.arange(count, dtype=np.int32)
    trained, frozen = jax.eval_shape(
        lambda params, rng: objective.init(params, vocabulary, rng),
        {"trunk": abstract_parameters(BlockwiseConfig(model.trunk), mesh)["trunk"]},
        jax.random.key(0),
    )
    moments = jax.eval_shape(optimizer.init, trained)
    state = TrainState(jnp.int32(0), trained, moments)
    read = spread((state, frozen), mesh, PartitionSpec())
    step: Any = make_step(objective, optimizer)
    return Program(
        name=output_name(config),
        about=about,
        mesh=mesh,
        lower=lambda: step.lower(*read, spread(batch, mesh, BATCH_SPEC)),
        model_flops=flops,
        reads=bytes_on_device(read),
    )


def spread(tree: PyTree, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Shapes and dtypes of arrays, with their sharding over a mesh."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def bytes_on_device(tree: PyTree) -> int:
    """Bytes of one device's share of arrays, given by shape, dtype and sharding."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )
