"""Training steps at full size: tokens per second, MFU, memory planned by XLA.

    python -m benchmarks.training --gin_file=gin_configs/runs/pretrain.gin \\
        --gin_file=gin_configs/meshes/one_device.gin --gin.BATCH_SIZE=16

Uses the model, batch size, mesh, λ and ComputeConfig of a gin file with random tokens,
and times whole steps of two models: all heads, and "one head", the same trunk with its
softmax alone; if the run samples positions for its heads, also a third with all heads
at all positions. First each model is alone on the devices, in ascending order of size,
and the peak memory of the process is read where devices report it; then they alternate
in blocks of steps, so that their ratio is robust to a varying clock rate. MFU is the
model's FLOP (`models.model_flops`, which excludes recomputation) relative to the
device's dense bfloat16 peak. Writes one JSON file.
"""

import dataclasses
import json
from typing import Any

import jax
from absl import flags

from benchmarks import records
from benchmarks.training_step import TimedStep, speed_of
from bpd_jax.base import cli, configuration, progress
from bpd_jax.models.mesh import make_mesh
from bpd_jax.models.parameters import count_parameters
from bpd_jax.training.config import TrainConfig

STEPS = flags.DEFINE_integer("steps", 10, "steps of a block.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "blocks of each model.")
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/training.json", "file.")


def main() -> None:
    """Times the steps; prints and writes the results."""
    parsed: configuration.Parsed[Any] = configuration.parse_flags(TrainConfig)
    config: TrainConfig = parsed.value
    mesh = make_mesh(config.mesh)
    config.check_mesh(mesh)
    configs = {"one head": _one_head(config)}
    heads = f"{config.model.block_size} heads"
    configs[heads] = config
    if config.positions_per_row is not None:
        everywhere = dataclasses.replace(config, positions_per_row=None)
        configs[f"{heads} at all positions"] = everywhere
    models, model_results = {}, {}
    for name, each in configs.items():
        models[name] = model = TimedStep(each, mesh)
        model.place()
        model.block(STEPS.value)
        # The peak of the process so far, hence the ascending order of sizes.
        stats = jax.local_devices()[0].memory_stats() or {}
        model.remove()
        model_results[name] = {
            "parameters": count_parameters(each.model)["total"],
            "planned_bytes_per_device": model.planned,
            "peak_bytes_in_use": stats.get("peak_bytes_in_use"),
        }
    for model in models.values():
        model.place()
        model.block(STEPS.value)  # the first steps are slower
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with progress.bar(label="steps", total=ROUNDS.value, unit=" rounds") as bar:
        for _ in range(ROUNDS.value):
            for name, model in models.items():
                seconds[name].append(model.block(STEPS.value))
            bar.update(1)
    for name, each in configs.items():
        model_results[name] |= speed_of(each, seconds[name])
    result = {
        **records.about("training"),
        "batch": [config.batch_size, config.length],
        "mesh": dict(mesh.shape),
        "compute": dataclasses.asdict(config.compute),
        "head_targets": config.head_targets,
        "head_weights": config.lambdas,
        "positions_per_row": config.positions_per_row,
        "models": model_results,
    }
    records.write(OUTPUT.value, result)
    print(json.dumps(result, indent=2))


def _one_head(config: TrainConfig) -> TrainConfig:
    """The same run of the trunk alone."""
    plain = dataclasses.replace(config.model, heads=None, drafter=None)
    return dataclasses.replace(
        config,
        model=plain,
        head_weights=None,
        head_targets="text",
        select_by="validation_loss",
    )


if __name__ == "__main__":
    cli.run(main)
