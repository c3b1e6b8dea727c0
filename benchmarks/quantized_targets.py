"""One drafter for a model in several precisions: drafts, speed, texts.

    python -m benchmarks.quantized_targets --num_prompts=24

The question of a reviewer of the paper: how do drafts compare with quantization? Loads
the same file with its matrices expanded to float32, as they are stored, rounded to 8
bits, and with activations rounded too; decodes the same prompts in each by plain
decoding and with the same drafter, in alternation; and compares block efficiency, speed
and texts. Writes one JSON file with device, date and versions.
"""

import statistics
from typing import Any

import jax
from absl import flags

from benchmarks import records
from bpd_jax import api
from bpd_jax.base import cli, progress
from bpd_jax.data.text_readers import read_prompts_file
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation.compare import compare, compile_methods, first_difference
from bpd_jax.evaluation.efficiency import block_efficiency

MODEL = flags.DEFINE_string("model", "smollm2", "known name or GGUF file.")
METHOD = flags.DEFINE_string("method", "block/tree:8", "method beside plain decoding.")
PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file", "experiments/smollm2/prompts.txt", "one prompt per line, or JSON."
)
NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 24, "number of prompts.", 1)
TOKENS = flags.DEFINE_integer("max_new_tokens", 48, "most new tokens.", 2)
ROUNDS = flags.DEFINE_integer("rounds", 2, "times that all is decoded.", 1)
OUTPUT = flags.DEFINE_string(
    "output", "benchmarks/results/quantized_targets.json", "file."
)

# Arguments of `api.load`; the first is what the others are compared with.
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"weights_dtype": "expanded"},
    "as stored": {"weights_dtype": "stored"},
    "matrices in 8 bits": {"weights_dtype": "int8"},
    "matrices and activations in 8 bits": {"precision": "int8"},
}


def agreement(texts: list[Generation], others: list[Generation]) -> dict[str, float]:
    """The share of equal texts, and of tokens before the first different one."""
    equal, common, total = 0, 0, 0
    for text, other in zip(texts, others, strict=True):
        at = first_difference(text.output_ids, other.output_ids)
        equal += at is None
        common += len(other.output_ids) if at is None else at
        total += len(other.output_ids)
    return {"equal_texts": equal / len(texts), "common_tokens": common / total}


def main() -> None:
    """Measures, prints and writes the results."""
    method = parse_method(METHOD.value)
    options = DecodeOptions(max_new_tokens=TOKENS.value)
    decoders, prompts = {}, []
    for name, arguments in SETTINGS.items():
        lm = api.load(MODEL.value, **arguments)
        texts = read_prompts_file(PROMPTS_FILE.value)[: NUM_PROMPTS.value]
        prompts = [lm.encode(text) for text in texts]
        decoders[name] = lm.decoder()
        compile_methods(decoders[name], [method], prompts, options)
    rates: dict[str, dict[str, list[float]]] = {
        name: {"plain": [], "drafts": []} for name in decoders
    }
    first: dict[str, tuple[list[Generation], list[Generation]]] = {}
    total = len(decoders) * ROUNDS.value
    with progress.bar(label="decoding", total=total, unit=" passes") as bar:
        for _ in range(ROUNDS.value):
            for name, decoder in decoders.items():
                results = compare(decoder, [method], prompts, options)
                for key, result in zip(rates[name], results, strict=True):
                    tokens = sum(len(text.output_ids) for text in result.generations)
                    rates[name][key].append(tokens / sum(result.seconds))
                first.setdefault(name, (results[0].generations, results[1].generations))
                bar.update()
    rows = {}
    reference = next(iter(SETTINGS))
    for name, (plain, drafted) in first.items():
        speeds = {key: statistics.median(values) for key, values in rates[name].items()}
        leaves = jax.tree.leaves(decoders[name].model.params)
        rows[name] = {
            "parameters_mb": sum(leaf.nbytes for leaf in leaves) / 1e6,
            "block_efficiency": block_efficiency(drafted),
            "tokens_per_second": speeds,
            "speedup": speeds["drafts"] / speeds["plain"],
            "plain_against_float32": speeds["plain"]
            / statistics.median(rates[reference]["plain"]),
            "drafts_against_float32": speeds["drafts"]
            / statistics.median(rates[reference]["plain"]),
            "lossless": agreement(drafted, plain)["equal_texts"],
            **agreement(plain, first[reference][0]),
        }
        numbers = {k: v for k, v in rows[name].items() if isinstance(v, float)}
        print(name, {key: round(number, 3) for key, number in numbers.items()})
    about = records.about("quantized_targets")
    records.write(
        OUTPUT.value,
        {**about, "method": method.name, "prompts": len(prompts), "results": rows},
    )


if __name__ == "__main__":
    cli.run(main)
