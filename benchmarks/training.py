"""Training steps at their real size: tokens per second, MFU, peak memory.

    python -m benchmarks.training --gin_file=gin_configs/runs/pretrain.gin \\
        --gin_file=gin_configs/meshes/one_device.gin --gin.BATCH_SIZE=16

Takes the model, batch, mesh and ComputeConfig of a gin file, random tokens, and times
whole steps: the same trunk with the model's softmax alone first, then with all heads.
The two take turns in blocks of steps after that, so that their ratio holds on a machine
whose clock wanders. MFU is what the model needs (`models.flops`, nothing that is
computed twice) over the device's dense bfloat16 peak. Writes one JSON file.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from bpd_jax import cli, configuration, files, progress
from bpd_jax.data.rows import make_batch
from bpd_jax.models.blockwise import count_parameters
from bpd_jax.models.partitioning import make_mesh
from bpd_jax.reporting import build
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.state import abstract_state, init_state
from bpd_jax.training.step import make_train_step, put_batch
from bpd_jax.training.throughput import peak_tokens_per_second
from bpd_jax.training.trainer import check_batch

STEPS = flags.DEFINE_integer("steps", 10, "steps of a block.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "blocks of each model.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/training.json", "file.")


def main() -> None:
    """Measures, prints, writes."""
    parsed: configuration.Parsed[Any] = configuration.parse_flags(TrainConfig)
    config: TrainConfig = parsed.value
    mesh = make_mesh(config.mesh)
    check_batch(config, mesh)
    plain = dataclasses.replace(config.model, heads=None)
    configs = {
        "one head": dataclasses.replace(config, model=plain, head_weights=None),
        f"{config.model.block_size} heads": config,
    }
    runs, found = {}, {}
    for name, each in configs.items():
        runs[name], planned = _blocks(each, mesh)
        runs[name]()  # the first steps are slower
        found[name] = {
            "parameters": count_parameters(each.model)["total"],
            "bytes_per_device": planned,
        }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with progress.bar(label="steps", total=ROUNDS.value, unit=" rounds") as bar:
        for _ in range(ROUNDS.value):
            for name, run in runs.items():
                seconds[name].append(run())
            bar.update(1)
    for name, each in configs.items():
        speed = each.tokens_per_step / statistics.median(seconds[name])
        peak = peak_tokens_per_second(each.model, each.length)
        found[name] |= {
            "seconds_per_step": seconds[name],
            "tokens_per_second": speed,
            "mfu": None if peak is None else speed / peak,
        }
    result = {
        "command": " ".join(["python -m benchmarks.training", *sys.argv[1:]]),
        "date": build.today(),
        "device": build.device(),
        "versions": build.versions(),
        "batch": [config.batch_size, config.length],
        "mesh": dict(mesh.shape),
        "compute": dataclasses.asdict(config.compute),
        "models": found,
    }
    text = json.dumps(result, indent=2)
    with files.replacing_file(pathlib.Path(OUTPUT.value)) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    print(text)


def _blocks(config: TrainConfig, mesh: Mesh) -> tuple[Callable[[], float], int]:
    """A function that runs a block of steps and gives the seconds of one.

    Also the bytes that XLA plans on each device: state, batch, temporaries. (A process
    knows its peak only for both models together.)
    """
    optimizer = make_optimizer(config.optimizer, config.steps)
    abstract = abstract_state(config.model, optimizer, mesh, config.compute)
    step = make_train_step(config.model, optimizer, abstract, mesh, config.compute)
    state = init_state(
        config.model, optimizer, abstract, config.seed, compute=config.compute
    )
    share = (config.batch_size // jax.process_count(), config.length)
    tokens = np.random.default_rng(config.seed).integers(
        0, config.model.trunk.vocab_size, share
    )
    batch = put_batch(make_batch(tokens, np.ones(share)), mesh)
    lambdas = np.ones(config.model.block_size, np.float32)
    compiled = step.lower(state, batch, lambdas).compile()
    memory = compiled.memory_analysis()
    planned = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(STEPS.value):
            state, metrics = compiled(state, batch, lambdas)
        jax.block_until_ready((state, metrics))
        return (time.perf_counter() - start) / STEPS.value

    return run, planned


if __name__ == "__main__":
    cli.run(main)
