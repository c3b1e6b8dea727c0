"""Tokens per second of training and of every decoding method on a trained model.

    python -m benchmarks.speed --model=runs/demo

Writes one JSON file to benchmarks/results/ with machine, date and versions. Decoding
methods take turns over `--rounds`, so that their ratios hold on a noisy machine; the
median round is reported.
"""

import json
import pathlib
import statistics
import sys
import time

import jax
import numpy as np
from absl import flags

from bpd_jax import cli, decode_flags, files, provenance
from bpd_jax.data.rows import RowIterator, open_rows
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.loaded_model import LoadedModel
from bpd_jax.decoding.methods import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation.efficiency import block_efficiency
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.state import abstract_state, init_state
from bpd_jax.training.step import make_train_step, put_batch

METHODS = flags.DEFINE_list(
    "methods",
    ["greedy", "bpd", "zero_gram:16", "ngram:1", "ngram:16"],
    "methods to time.",
)
NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 16, "held-out prompts.")
PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "tokens of each prompt.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "times that every method decodes all.")
TRAIN_STEPS = flags.DEFINE_integer("train_steps", 60, "timed training steps.")
BATCH_ROWS = flags.DEFINE_integer("batch_rows", 8, "rows of a training step.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/speed_cpu.json", "file.")


def training_speed(loaded: LoadedModel) -> float:
    """Tokens per second of training steps, compilation not counted."""
    mesh = make_mesh(MeshConfig())
    config = loaded.functions.config
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3), TRAIN_STEPS.value)
    abstract = abstract_state(config, optimizer, mesh)
    state = init_state(config, optimizer, abstract, seed=0)
    lambdas = np.ones(config.block_size, np.float32)
    step = make_train_step(config, optimizer, abstract, mesh)
    rows = open_rows(loaded.folder / "data" / "train")
    batches = RowIterator(rows, BATCH_ROWS.value, seed=0)
    for number in range(TRAIN_STEPS.value + 5):
        if number == 5:
            jax.block_until_ready(state)
            start = time.perf_counter()
        state, _ = step(state, put_batch(next(batches), mesh), lambdas)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    return TRAIN_STEPS.value * BATCH_ROWS.value * rows.length / seconds


def decoding_speed(
    loaded: LoadedModel, decoder: Decoder, options: DecodeOptions
) -> dict[str, dict[str, float]]:
    """Median tokens per second and block efficiency of every method."""
    prompts = loaded.held_out(NUM_PROMPTS.value, PROMPT_TOKENS.value)
    methods = [parse_method(name) for name in METHODS.value]
    speeds: dict[str, list[float]] = {method.name: [] for method in methods}
    efficiencies = {}
    for _ in range(ROUNDS.value):
        for method in methods:
            generations = decoder.decode(method, prompts, options)
            tokens = sum(len(g.output_ids) for g in generations)
            speeds[method.name].append(tokens / sum(g.seconds for g in generations))
            efficiencies[method.name] = block_efficiency(generations)
    return {
        name: {
            "tokens_per_second": statistics.median(values),
            "slowest": min(values),
            "fastest": max(values),
            "block_efficiency": efficiencies[name],
        }
        for name, values in speeds.items()
    }


def main() -> None:
    """Measures, prints, writes."""
    lm, decoder, config = decode_flags.load(decode_flags.config())
    loaded = lm.loaded
    options = config.options
    result = {
        "command": " ".join(["python -m benchmarks.speed", *sys.argv[1:]]),
        "date": provenance.today(),
        "device": provenance.device(),
        "versions": provenance.versions(),
        "prompts": NUM_PROMPTS.value,
        "new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "training_tokens_per_second": training_speed(loaded),
        "decoding": decoding_speed(loaded, decoder, options),
    }
    text = json.dumps(result, indent=2)
    with files.replacing_file(pathlib.Path(OUTPUT.value)) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    cli.run(main)
