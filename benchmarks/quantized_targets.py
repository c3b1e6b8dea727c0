"""One drafter for a model in several precisions: drafts, speed, texts.

    python -m benchmarks.quantized_targets --prompts_file=questions.jsonl --rounds=2

The question of a reviewer of the paper: how do drafts compare with quantization? Loads
the same file with its matrices expanded to float32, rounded from there to 8 bits, as
they are stored, and stored with activations rounded too; decodes the same prompts in
each by plain decoding, with the same drafter, and by the default method, in
alternation; and compares block efficiency, speed and texts. Writes one JSON file with
device, date and versions.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks import records
from bpd_jax.base import cli, progress
from bpd_jax.data.text_readers import read_prompts_file
from bpd_jax.decoding.asset_files import with_assets
from bpd_jax.decoding.compare import compare, compile_methods, first_difference
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.loading import load_model
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation.efficiency import (
    block_efficiency,
    bootstrap_interval,
    paired_interval,
    ratio_interval,
)

MODEL = cli.DEFINE_path("model", "smollm2", "known name or GGUF file.")
METHOD = flags.DEFINE_string("method", "block/tree:8", "method beside the default.")
PROMPTS_FILE = cli.DEFINE_path(
    "prompts_file",
    ["experiments/smollm2/prompts.txt"],
    "one prompt per line, or JSON Lines with the field prompt; may be repeated.",
)
NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 24, "prompts of each file.", 1)
TOKENS = flags.DEFINE_integer("max_new_tokens", 48, "most new tokens.", 2)
ROUNDS = flags.DEFINE_integer("rounds", 2, "times that all is decoded.", 1)
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/quantized_targets.json", "file.")


@dataclasses.dataclass(frozen=True)
class Target:
    """How the model is loaded: arguments of `load_model` and of `for_decoding`."""

    stored: bool = True
    rounds: bool = False
    precision: str | None = None

    def load(self) -> LanguageModel:
        loaded = with_assets(load_model(MODEL.value, stored=self.stored), {})
        return loaded.for_decoding(self.precision, rounds=self.rounds)


# The first is what the others are compared with.
TARGETS = {
    "float32": Target(stored=False),
    "8 bits": Target(stored=False, rounds=True),
    "as stored": Target(),
    "as stored, activations in 8 bits": Target(precision="int8"),
}


def agreement(
    texts: Sequence[Generation], others: Sequence[Generation]
) -> dict[str, Any]:
    """The shares of equal texts and of tokens before the first different one."""
    lengths = np.array([len(other.output_ids) for other in others])
    pairs = zip(texts, others, strict=True)
    places = [
        first_difference(text.output_ids, other.output_ids) for text, other in pairs
    ]
    equal = np.array([place is None for place in places])
    same = [n if at is None else at for at, n in zip(places, lengths, strict=True)]
    common = np.array(same)
    return {
        "equal_texts": float(equal.mean()),
        "common_tokens": common.sum() / lengths.sum(),
        "common_tokens_interval": ratio_interval(common, lengths),
    }


def main() -> None:
    """Measures, prints and writes the results."""
    options = DecodeOptions(max_new_tokens=TOKENS.value)
    decoders, methods, prompts = {}, {}, []
    for name, target in TARGETS.items():
        lm = target.load()
        texts = [
            text
            for path in PROMPTS_FILE.value
            for text in read_prompts_file(path)[: NUM_PROMPTS.value]
        ]
        prompts = [lm.encode(text) for text in texts]
        decoder = decoders[name] = lm.decoder()
        methods[name] = [parse_method(METHOD.value), decoder.default_method]
        compile_methods(decoder, methods[name], prompts, options)
    kinds = ("plain", "drafts", "default")
    seconds: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in kinds} for name in decoders
    }
    first: dict[str, list[list[Generation]]] = {}
    total = len(decoders) * ROUNDS.value
    with progress.bar(label="decoding", total=total, unit=" passes") as bar:
        for _ in range(ROUNDS.value):
            for name, decoder in decoders.items():
                results = compare(decoder, methods[name], prompts, options)
                for kind, result in zip(kinds, results, strict=True):
                    seconds[name][kind].append(sum(result.seconds))
                first.setdefault(name, [result.generations for result in results])
                bar.update()
    reference = next(iter(TARGETS))
    base, base_drafts, _ = first[reference]
    rows = {}
    for name, (plain, drafts, default) in first.items():
        tokens = sum(len(text.output_ids) for text in plain)
        speeds = {
            kind: tokens / statistics.median(of_kind)
            for kind, of_kind in seconds[name].items()
        }
        leaves = jax.tree.leaves(decoders[name].model.params)
        rows[name] = {
            "parameters_mb": sum(leaf.nbytes for leaf in leaves) / 1e6,
            "default_method": methods[name][1].name,
            "block_efficiency": block_efficiency(drafts),
            "block_efficiency_interval": bootstrap_interval(drafts),
            "block_efficiency_against_float32": block_efficiency(drafts)
            / block_efficiency(base_drafts),
            "paired_interval": paired_interval(drafts, base_drafts),
            "tokens_per_second": speeds,
            "speedup": speeds["drafts"] / speeds["plain"],
            "speedup_of_default": speeds["default"] / speeds["plain"],
            "lossless": agreement(drafts, plain)["equal_texts"],
            "default_lossless": agreement(default, plain)["equal_texts"],
            **agreement(plain, base),
        }
    for row in rows.values():
        row["against_float32"] = {
            kind: speed / rows[reference]["tokens_per_second"]["plain"]
            for kind, speed in row["tokens_per_second"].items()
        }
    print("tokens per call; against plain decoding in float32: plain, drafts, default;")
    print("equal texts; tokens before the first different one:")
    for name, row in rows.items():
        speeds = " ".join(f"{row['against_float32'][kind]:5.2f}" for kind in kinds)
        print(
            f"{name:34}{row['block_efficiency']:5.2f}  {speeds}"
            f"{row['equal_texts']:7.0%}{row['common_tokens']:6.0%}"
        )
    about = records.about("quantized_targets")
    about |= {"method": METHOD.value, "prompts": len(prompts), "rounds": ROUNDS.value}
    records.write(OUTPUT.value, {**about, "results": rows})


if __name__ == "__main__":
    cli.run(main)
