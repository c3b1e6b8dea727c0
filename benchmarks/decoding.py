"""Compares decoding methods on one model: block efficiency, time and losslessness.

    python -m benchmarks.decoding --model=demo --methods=greedy,bpd,ngram:16,medusa:32

Methods alternate over `--rounds`, so that their ratios are robust to noise of the
machine, and every text is compared with plain greedy decoding: the command fails if one
differs by more than a near tie. Prefill (which the time of a serial call excludes),
drafting alone and passes over 1 … 128 tokens are measured separately. Writes one JSON
file with device, date and versions.
"""

import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks import records
from benchmarks.call_costs import measure_drafting, measure_passes
from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.data.text_readers import read_prompts_file
from bpd_jax.decoding.compare import (
    MethodResult,
    compare,
    compile_methods,
    fail_on_errors,
)
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.generate import Generation, compile_task
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation import decode_flags, prompt_flags
from bpd_jax.evaluation.draft_statistics import draft_statistics
from bpd_jax.evaluation.efficiency import block_efficiency, paired_interval
from bpd_jax.storage.paths import as_path

flags.set_default(
    prompt_flags.METHODS,
    [
        "bpd",
        "zero_gram:16",
        "ngram:1",
        "ngram:16",
        "ngram_device:16",
        "ngram:4:adaptive=1",
        "medusa:16",
        "medusa_ngram:16:search=best",
        "prompt_lookup:8",
        "lookahead:8",
        "oracle",
    ],
)
flags.set_default(prompt_flags.NUM_PROMPTS, 8)
ROUNDS = flags.DEFINE_integer(
    "rounds", 3, "times that each method decodes all prompts."
)
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/decoding_cpu.json", "file.")


def figures(
    decoder: Decoder,
    result: MethodResult,
    plain: MethodResult,
    base: MethodResult,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    files: dict[str, slice],
) -> dict[str, Any]:
    """The results of one method, as they are reported; the gain is that over `base`.

    `files` has the name of each file of prompts, and which prompts are of it.
    """
    method, texts = result.method, result.generations
    took = statistics.median(result.seconds)
    batch = min(options.batch_size, len(prompts))
    calls = [text.serial_calls for text in texts]
    # A batch takes as many serial calls as its slowest row.
    begins = range(0, len(prompts), batch)
    turns = sum(max(calls[begin : begin + batch]) for begin in begins)
    prefill = prefill_seconds(decoder, method, prompts, options, plain.generations)
    call = (took - prefill) / turns
    drafting = 0.0
    if method != GREEDY:
        drafting = measure_drafting(decoder, method, prompts[0], batch)
    efficiency = block_efficiency(texts)
    return {
        "block_efficiency": efficiency,
        "gain": efficiency / block_efficiency(base.generations) - 1,
        "gain_over": base.method.name,
        "paired_interval": paired_interval(texts, base.generations),
        "tokens_per_second": sum(len(text.output_ids) for text in texts) / took,
        "slowest_seconds": max(result.seconds),
        "fastest_seconds": min(result.seconds),
        "speedup": result.speedup(plain),
        "speedup_by_file": {
            name: result.speedup_of(plain, part) for name, part in files.items()
        },
        "ms_prefill": 1e3 * prefill / len(begins),
        "ms_per_serial_call": 1e3 * call,
        "ms_drafting_alone": 1e3 * drafting,
        "drafting_share_of_call": drafting / call,
        "nodes_per_call": draft_statistics(texts).nodes,
        "texts_that_differ": len(result.differences),
        "of_them_near_ties": len(result.differences) - len(result.errors),
    }


def prefill_seconds(
    decoder: Decoder,
    method: Method,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    greedy: list[Generation],
) -> float:
    """Seconds of the prefills of all batches."""
    task = decoder.task(method, options, greedy if method.is_oracle else None)
    compile_task(task, prompts)
    batch = min(options.batch_size, len(prompts))
    start = time.perf_counter()
    for begin in range(0, len(prompts), batch):
        indices = range(begin, min(begin + batch, len(prompts)))
        rows = task.rows(batch)
        state = task.prefill(prompts, indices, rows, options.max_new_tokens)
        jax.block_until_ready(state)
    return time.perf_counter() - start


def verdict(result: MethodResult) -> str:
    """Describes the differences of texts from plain decoding."""
    if result.errors:
        return f"{len(result.errors)} DIFFER"
    ties = len(result.differences)
    return f"{ties} near ties" if ties else "equal"


def _files() -> dict[str, slice]:
    """Which prompts are of each `--prompts_file`."""
    files, begin = {}, 0
    for path in decode_flags.PROMPTS_FILE.value:
        end = begin + len(read_prompts_file(path))
        name = as_path(path).stem
        files[path if name in files else name] = slice(begin, end)
        begin = end
    return files


def main() -> None:
    """Times the methods; prints and writes the results."""
    lm, decoder, config = decode_flags.load(decode_flags.config())
    loaded, options = lm, config.options
    prompts, _ = prompt_flags.prompts(loaded)
    if options.temperature != 0:
        raise UserError("the benchmark decodes greedily: leave --temperature at 0.")
    methods = list(dict.fromkeys([GREEDY, *prompt_flags.methods()]))
    compile_methods(decoder, methods[1:], prompts, options)
    with decode_flags.token_bar(
        "decoding", ROUNDS.value * len(methods) * len(prompts), config
    ) as bar:
        results = compare(
            decoder,
            methods,
            prompts,
            options,
            lambda label, tokens: bar.update(tokens),
            rounds=ROUNDS.value,
        )
    bpd = parse_method("bpd")
    base = next((result for result in results if result.method == bpd), results[0])
    by_file = _files()
    figures_by_method = {
        result.method.name: figures(
            decoder, result, results[0], base, prompts, options, by_file
        )
        for result in results
    }
    batch = min(options.batch_size, len(prompts))
    length = prompt_flags.PROMPT_TOKENS.value + options.max_new_tokens
    passes = measure_passes(decoder, batch, length)
    records.write(
        OUTPUT.value,
        {
            **records.about("decoding"),
            "precision": decoder.model.precision,
            "prompts": len(prompts),
            "new_tokens": options.max_new_tokens,
            "batch_size": options.batch_size,
            "verification": options.verification,
            "ms_of_a_pass": {size: 1e3 * s for size, s in passes.seconds.items()},
            "methods": figures_by_method,
        },
    )
    print(
        f"{'method':<30} tokens/call  gain over {base.method.name:<16} ms/call  "
        "drafting  tokens/s  speed-up  text"
    )
    for result, row in zip(results, figures_by_method.values(), strict=True):
        low, high = row["paired_interval"]
        gain = f"{100 * row['gain']:+.1f} % ({100 * low:+.1f} … {100 * high:+.1f})"
        print(
            f"{result.method.name:<30} {row['block_efficiency']:>11.2f}  {gain:<26} "
            f"{row['ms_per_serial_call']:>7.2f} {row['ms_drafting_alone']:>9.2f} "
            f"{row['tokens_per_second']:>9.0f} {row['speedup']:>9.2f}  "
            f"{verdict(result)}"
        )
    print(f"written to {OUTPUT.value} ({jax.default_backend()})")
    fail_on_errors(results, pathlib.Path(OUTPUT.value))


if __name__ == "__main__":
    cli.run(main)
