"""What further heads cost: memory of the loss, time of a training step.

    python -m benchmarks.loss_memory

Compiles the loss with its gradient for one head and for many, whole and in chunks, and
writes the temporary memory that XLA plans for each. Then times training steps of both
models, in turns, beside what their FLOPs predict. The trunk is small, so that the heads
are nearly all there is. Writes one JSON file with machine, date and versions.

FLOPs are counted from the sizes: XLA counts the body of a loop once.
"""

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

from bpd_jax import cli, files, progress, provenance
from bpd_jax.data.rows import Batch, make_batch
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.compute import ComputeConfig
from bpd_jax.models.model_flops import train_flops
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.loss import blockwise_loss
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.state import abstract_state, init_state
from bpd_jax.training.step import make_train_step, put_batch

HEADS = flags.DEFINE_integer("heads", 9, "heads of the larger model.")
ROWS = flags.DEFINE_integer("rows", 8, "rows of a batch.")
LENGTH = flags.DEFINE_integer("length", 512, "tokens of a row.")
VOCAB = flags.DEFINE_integer("vocab_size", 50257, "tokens of the vocabulary.")
D_MODEL = flags.DEFINE_integer("d_model", 128, "width of the trunk.")
CHUNK = flags.DEFINE_integer("loss_chunk", 128, "positions of a chunk.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "timed steps of each model.")
OUTPUT = flags.DEFINE_string(
    "output", "benchmarks/results/loss_memory_cpu.json", "file."
)


def make_model(heads: int) -> BlockwiseConfig:
    """Two layers, and block heads if there is more than one."""
    width = D_MODEL.value
    trunk = TransformerConfig(
        VOCAB.value, 2, width, 4 * width, 2, max_length=LENGTH.value
    )
    if heads == 1:
        return BlockwiseConfig(trunk)
    return BlockwiseConfig(trunk, BlockHeadsConfig(heads, hidden=4 * width))


def make_rows() -> Batch:
    """Random tokens, one document in each row."""
    shape = (ROWS.value, LENGTH.value)
    tokens = np.random.default_rng(0).integers(0, VOCAB.value, shape)
    return make_batch(tokens, np.ones(shape))


def loss_memory(model: BlockwiseConfig, batch: Batch, chunk: int | None) -> int:
    """Temporary bytes of the loss with its gradient; nothing is run."""
    lambdas = (1.0,) * model.block_size

    def loss(params: Any) -> jax.Array:
        compute = ComputeConfig(loss_chunk=chunk)
        return blockwise_loss(model, params, batch, lambdas, compute)[0]

    program = jax.jit(jax.value_and_grad(loss)).lower(parameter_shapes(model))
    return program.compile().memory_analysis().temp_size_in_bytes


def make_stepper(model: BlockwiseConfig, batch: Batch) -> Callable[[], float]:
    """A function that runs one compiled training step and gives its seconds."""
    compute = ComputeConfig(loss_chunk=CHUNK.value)
    mesh = make_mesh(MeshConfig())
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3), 1000)
    abstract = abstract_state(model, optimizer, mesh)
    lambdas = np.ones(model.block_size, np.float32)
    rows = put_batch(batch, mesh)
    step = make_train_step(model, optimizer, abstract, mesh, compute)
    state = init_state(model, optimizer, abstract, seed=0)

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, rows, lambdas))
        return time.perf_counter() - start

    run()
    return run


def step_times(batch: Batch) -> dict[str, Any]:
    """Seconds of a step of both models, and their ratio beside that of the FLOPs."""
    counts = (1, HEADS.value)
    steppers = {heads: make_stepper(make_model(heads), batch) for heads in counts}
    seconds: dict[int, list[float]] = {heads: [] for heads in counts}
    with progress.bar(label="steps", total=ROUNDS.value, unit=" rounds") as bar:
        for _ in range(ROUNDS.value):
            for heads, run in steppers.items():
                seconds[heads].append(run())
            bar.update(1)
    flops = {
        heads: train_flops(make_model(heads), ROWS.value, LENGTH.value)
        for heads in counts
    }
    medians = {heads: statistics.median(times) for heads, times in seconds.items()}
    few, many = counts
    ratio, predicted = medians[many] / medians[few], flops[many] / flops[few]
    return {
        "loss_chunk": CHUNK.value,
        "rounds": ROUNDS.value,
        "seconds": {
            f"{heads}_heads": {
                "median": medians[heads],
                "fastest": min(times),
                "slowest": max(times),
            }
            for heads, times in seconds.items()
        },
        "flops": {f"{heads}_heads": flops[heads] for heads in counts},
        "time_ratio": ratio,
        "flops_ratio": predicted,
        "time_over_prediction": ratio / predicted,
    }


def main() -> None:
    """Measures, prints, writes."""
    batch = make_rows()
    memory = {}
    for chunk in (None, CHUNK.value):
        one, many = (
            loss_memory(make_model(heads), batch, chunk) for heads in (1, HEADS.value)
        )
        memory[f"chunk_{chunk or LENGTH.value}"] = {
            "1_heads": one,
            f"{HEADS.value}_heads": many,
            "ratio": many / one,
        }
    result = {
        "command": " ".join(["python -m benchmarks.loss_memory", *sys.argv[1:]]),
        "date": provenance.today(),
        "device": provenance.device(),
        "versions": provenance.versions(),
        "batch": [ROWS.value, LENGTH.value],
        "vocab_size": VOCAB.value,
        "d_model": D_MODEL.value,
        "heads": HEADS.value,
        "loss_temporary_bytes": memory,
        "step": step_times(batch),
    }
    text = json.dumps(result, indent=2)
    with files.replacing_file(pathlib.Path(OUTPUT.value)) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    cli.run(main)
