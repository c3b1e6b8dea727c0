"""Training steps of the paper's model: tokens per second and MFU.

The MFU excludes recomputation (`models.model_flops`).
"""

from collections.abc import Iterator
from typing import Any

import jax

from benchmarks.accelerator_parts.jobs import TINY, Job, JobSettings, Row
from benchmarks.training_step import TimedStep, speed_of
from bpd_jax.base import configuration
from bpd_jax.models.mesh import make_mesh
from bpd_jax.models.parameters import count_parameters
from bpd_jax.training.config import TrainConfig

# Rows of 512 tokens that every device processes in a step.
ROWS = (8, 16, 32)

_TINY = (*TINY, "HEADS = 2", "LENGTH = 16")


def jobs(settings: JobSettings) -> Iterator[Job]:
    """One job for each number of rows."""
    for rows in (1,) if settings.tiny else ROWS:
        yield (
            f"blockwise_1b5, {rows} rows per device",
            lambda rows=rows: _step(settings, rows),
        )


def _step(settings: JobSettings, rows: int) -> Row:
    """Whole steps, with the state sharded over all devices."""
    devices = jax.device_count()
    bindings = [
        f"BATCH_SIZE = {rows * devices}",
        f"MeshConfig.fsdp = {devices}",
        "ComputeConfig.accumulate = 1",
        *(_TINY if settings.tiny else ()),
    ]
    parsed: Any = configuration.parse(
        ["gin_configs/runs/pretrain.gin", "gin_configs/meshes/one_device.gin"],
        bindings,
        TrainConfig,
    )
    config: TrainConfig = parsed.value
    mesh = make_mesh(config.mesh)
    config.check_mesh(mesh)
    step = TimedStep(config, mesh)
    step.place()
    steps = 1 if settings.tiny else 5
    step.block(steps)  # the first steps are slower
    seconds = [step.block(steps) for _ in range(settings.rounds)]
    step.remove()
    return {
        "parameters": count_parameters(config.model)["total"],
        "batch": [config.batch_size, config.length],
        "mesh": dict(mesh.shape),
        "planned_bytes_per_device": step.planned,
        **speed_of(config, seconds),
    }
