"""Descriptions of a run that are printed before it starts."""

import jax
import numpy as np
from jax.sharding import Mesh

from bpd_jax.data.rows import PackedRows, make_batch
from bpd_jax.models.attachments import by_path
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.parameters import count_parameters
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.metrics import tensorboard_available
from bpd_jax.training.state import (
    TrainState,
    abstract_state,
    bytes_per_device,
    make_optimizer,
    state_bytes,
)


def describe_model(model: BlockwiseConfig) -> str:
    """The sizes of a model and the number of parameters of each part."""
    trunk, counts = model.trunk, count_parameters(model)
    parts = ", ".join(
        f"{part} {count:,}" for part, count in counts.items() if part != "total"
    )
    return (
        f"model: {trunk.num_layers} layers of {trunk.d_model}/{trunk.d_ff}, "
        f"{trunk.num_heads} attention heads of width {trunk.head_width}, "
        f"{predictors(model)}, vocabulary {trunk.vocab_size:,}\n"
        f"parameters: {counts['total']:,} ({parts})"
    )


def predictors(model: BlockwiseConfig) -> str:
    """The block heads or the block drafter of a model, in words."""
    if model.drafter is None:
        return f"{model.block_size} block heads"
    return f"a block drafter of {model.drafter.block_size} tokens"


def describe_run(
    config: TrainConfig,
    abstract: TrainState,
    mesh: Mesh,
    train: PackedRows,
    validation: PackedRows,
    start: int,
) -> str:
    """Model, data, length and memory of a run, in a few lines."""
    epochs = config.steps * config.batch_size / len(train)
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    count = jax.process_count()
    lines = [
        describe_model(config.model),
        f"data: {config.task.name}, {train.num_tokens:,} tokens to train on "
        f"({epochs:.1f} passes), {validation.num_tokens:,} to validate on",
        f"run: steps {start:,} to {config.steps:,} of {config.batch_size} × "
        f"{config.length} tokens on {jax.device_count()} "
        f"{jax.devices()[0].device_kind}" + (f" of {count} processes" * (count > 1)),
        f"memory: {bytes_per_device(abstract) / 1e6:,.1f} MB of parameters and "
        f"optimizer per device, mesh {axes}",
    ]
    if not tensorboard_available():
        lines.append("note: no TensorBoard files, tensorboardX is not installed")
    return "\n".join(lines)


def describe_shapes(config: TrainConfig, mesh: Mesh) -> str:
    """Shapes, dtypes and shardings of the parameters and of a step's results.

    They are found by tracing; nothing is computed.
    """
    optimizer = make_optimizer(config.optimizer, config.steps)
    abstract = abstract_state(config.model, optimizer, mesh, config.compute)
    ids = np.zeros((config.batch_size, config.length), np.int32)
    arguments = abstract.params, make_batch(ids, ids), np.array(config.lambdas)
    loss, sums = jax.eval_shape(config.loss(None), *arguments)
    size, share = state_bytes(abstract), bytes_per_device(abstract)
    lines = [
        f"  {name}: {x.dtype}{list(x.shape)} {x.sharding.spec}"
        for name, x in by_path(abstract.params).items()
    ]
    return "\n".join(
        [
            f"mesh: {dict(mesh.shape)}",
            "parameters and the mesh axes that split them:",
            *lines,
            f"train state: {size / 1e6:,.1f} MB in all, {share / 1e6:,.1f} MB on each "
            "device",
            f"step: batch {ids.dtype}{list(ids.shape)} gives loss {loss.dtype} and "
            f"{sums.loss.shape[0]} head losses",
            f"tokens per step: {config.tokens_per_step:,}",
        ]
    )
