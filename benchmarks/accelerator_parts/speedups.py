"""Speed-ups from tokens per call on record and the cost of calls.

A method that decodes τ tokens per call, with M draft tokens, is

    τ · pass(1) / (pass(M) + drafting)

times as fast as plain decoding. Where a device was measured, `pass` and `drafting` are
its times. Elsewhere they are predicted from the chip's peaks: a pass takes the time of
reading the weights and the cache, or that of the arithmetic if it is longer; the search
under n-grams takes none. `table` has both.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator_parts.jobs import JobSettings, drafter_config
from benchmarks.call_costs import PassCosts
from bpd_jax.base.chips import CHIPS, Chip, chip_of_device
from bpd_jax.evaluation.token_cost import ModelSize, cost, model_size
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path

# Tokens per call of SmolLM2 on 96 held-out prompts of eight kinds.
RECORD = as_path(__file__).parent.parent / "results/refiners_smollm2_drafter.json"

MODELS = {
    "SmolLM2-135M": "smollm2_135m",
    "1.5B": "blockwise_1b5",
    "7B": "llama_7b",
}
DEVICES = ("h100", "v5e", "v4-megacore")
CONTEXT = 512
BATCHES = (1, 8)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A method whose tokens per call are on record.

    Attributes:
      label: its name in the table.
      method: its key in the record.
      drafting: the method whose drafting is timed for it.
    """

    label: str
    method: str
    drafting: str


RECORDED = (
    Recorded("BPD", "bpd", "bpd"),
    Recorded("16-best 4-gram", "ngram:16", "ngram_device:16"),
    Recorded("block drafter", "block/greedy", "block/greedy"),
    Recorded(
        "block drafter, tree of 16 under 4-grams",
        "block+ngram:alpha=0.25/tree:16",
        "block+ngram:alpha=0.25/tree:16",
    ),
    Recorded("block drafter, tree of 64", "block/tree:64", "block/tree:64"),
)


@functools.cache
def record() -> Mapping[str, Any]:
    """The record: by method, `block_efficiency` and `nodes_per_call`."""
    methods: Mapping[str, Any] = files.read_json(RECORD)["methods"]
    return methods


def measured(
    drafting: str, ms_by_tokens: Mapping[str, float], ms_drafting: float
) -> dict[str, float]:
    """Speed-ups by label, from measured milliseconds.

    Args:
      drafting: the method whose drafting was timed.
      ms_by_tokens: milliseconds of passes by their number of tokens.
      ms_drafting: milliseconds of drafting for one call.
    """
    passes = PassCosts({int(m): ms for m, ms in ms_by_tokens.items()})
    result = {}
    for each in RECORDED:
        if each.drafting == drafting:
            row = record()[each.method]
            call = passes.at(round(row["nodes_per_call"])) + ms_drafting
            result[each.label] = row["block_efficiency"] * passes.at(1) / call
    return result


def predicted(
    chip: Chip, model: BlockwiseConfig, each: Recorded, batch: int = 1
) -> float:
    """The speed-up of a method in bfloat16 at a context of 512 tokens.

    The rows of a batch share the reading of weights.
    """
    row = record()[each.method]
    size, weights, queries = _sizes(model)

    def seconds(nodes: float, drafting: bool) -> float:
        one = cost(size, CONTEXT, nodes=nodes, drafting=drafting)
        traffic = one.parameter_bytes + batch * one.kv_bytes
        return _seconds(chip, traffic, batch * one.flops)

    nodes, uses_heads = row["nodes_per_call"], not each.method.startswith("block")
    call = seconds(nodes, uses_heads)
    if not uses_heads:
        call += _seconds(chip, 2.0 * weights, 2.0 * weights * queries * batch)
    return row["block_efficiency"] * seconds(1, False) / call


def _seconds(chip: Chip, traffic: float, flops: float) -> float:
    return max(traffic / chip.hbm, flops / chip.flops)


@functools.cache
def _sizes(model: BlockwiseConfig) -> tuple[ModelSize, int, int]:
    """Of the model; weights of its drafter with the softmax; the drafter's queries."""
    trunk = model.trunk
    functions = DrafterFunctions(drafter_config(model).resolve(trunk), trunk)
    shapes = jax.eval_shape(functions.init, jax.random.key(0))
    weights = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
    softmax = trunk.vocab_size * trunk.d_model
    return model_size(model), weights + softmax, functions.config.queries


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of predictions in Markdown, with what has been measured beside it.

    Args:
      rows: rows of `results.read`.
    """
    settings = JobSettings(tiny=False, rounds=1, batch_sizes=(1,))
    names = [name.removesuffix("-megacore") for name in DEVICES]
    heads = [f"{name} {kind}" for name in names for kind in ("predicted", "measured")]
    lines = [
        "| " + " | ".join(["model, batch, method", "tokens per call", *heads]) + " |",
        "|---|" + "--:|" * (1 + len(heads)),
    ]
    for (title, file), batch in itertools.product(MODELS.items(), BATCHES):
        model = settings.model(file)
        for each in RECORDED:
            cells = [f"{title}, {batch}, {each.label}"]
            cells.append(f"{record()[each.method]['block_efficiency']:.2f}")
            for name in DEVICES:
                cells.append(f"{predicted(CHIPS[name], model, each, batch):.2f}")
                job = f"{file}, batch {batch}, {each.drafting}"
                found = [
                    row["speedups"][each.label]
                    for row in rows
                    if row["job"] == job
                    and chip_of_device(row["device"]) == CHIPS[name]
                    and "speedups" in row
                ]
                cells.append(f"{found[-1]:.2f}" if found else "")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
