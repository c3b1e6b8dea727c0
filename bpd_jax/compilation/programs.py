"""The programs to compile: jitted functions with the shapes of their arguments."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax.base.typing import PyTree
from bpd_jax.data.rows import Batch
from bpd_jax.models.model_flops import train_flops
from bpd_jax.models.partitioning import BATCH_SPEC
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.run_description import predictors
from bpd_jax.training.state import abstract_state, make_optimizer
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
            config.model,
            optimizer,
            abstract,
            mesh,
            compute=compute,
            settings=config.loss,
        )
        ids = np.zeros((config.batch_size, config.length), np.int32)
        batch = Batch(ids, ids, ids, ids.astype(bool))
        lambdas = np.zeros(config.model.num_losses, np.float32)
        return step.lower(
            abstract,
            spread(batch, mesh, BATCH_SPEC),
            spread(lambdas, mesh, PartitionSpec()),
        )

    return Program(
        name="train",
        about=(
            f"{config.batch_size} × {config.length} tokens, "
            f"{predictors(config.model)}, {_in_words(compute)}"
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


def _in_words(compute: Any) -> str:
    """The settings that differ from their defaults, as text."""
    return ", ".join(
        f"{field.name} {getattr(compute, field.name)}"
        for field in dataclasses.fields(compute)
        if getattr(compute, field.name) != field.default
    )
