"""All decoding methods side by side on one model: what each yields and what it costs.

    python -m benchmarks.decoding --model=demo --methods=greedy,bpd,ngram:16,medusa:32

Methods take turns over `--rounds`, so that their ratios hold on a noisy machine, and
every text is compared with plain greedy decoding: the command fails if one differs by
more than a near tie. Running the prompts (which the time of a serial call leaves out),
drafting alone, passes over 1 … 128 tokens, and the memory that verification takes are
measured apart. Writes one JSON file with machine, date and versions.

`--random_model=FILE` takes random weights of the sizes in a gin file instead of a run
folder: what a call costs at that size, with texts and acceptance that mean nothing.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
from absl import flags

from bpd_jax import cli, configuration, decode_flags, files, progress, provenance
from bpd_jax.decoding.decode_loop import decode_on_device
from bpd_jax.decoding.decode_state import DecodeState
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.generate import Generation, Task
from bpd_jax.decoding.methods import Method, parse_method
from bpd_jax.decoding.options import VERIFICATIONS, DecodeConfig, DecodeOptions
from bpd_jax.decoding.speedup import measure_drafting, measure_passes
from bpd_jax.decoding.verification import laid_out
from bpd_jax.drafting.assets import Assets
from bpd_jax.errors import UserError
from bpd_jax.evaluation.draft_statistics import draft_statistics
from bpd_jax.evaluation.efficiency import block_efficiency, paired_interval
from bpd_jax.evaluation.equality import differences
from bpd_jax.models.blockwise import init_parameters
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.ngrams.formats import load_model as ngram_files

METHODS = flags.DEFINE_list(
    "methods",
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
    "methods to time beside greedy decoding.",
)
NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 8, "held-out prompts.")
PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "tokens of each prompt.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "times that every method decodes all.")
RANDOM_MODEL = flags.DEFINE_string(
    "random_model", None, "gin file of a model to take random weights for."
)
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/decoding_cpu.json", "file.")


def measure(
    decoder: Decoder,
    methods: list[Method],
    prompts: list[np.ndarray],
    options: DecodeOptions,
) -> dict[str, dict[str, Any]]:
    """Everything about every method, by its name."""
    texts: dict[Method, list[Generation]] = {}
    seconds: dict[Method, list[float]] = {method: [] for method in methods}
    total = ROUNDS.value * len(methods)
    with progress.bar(label="decoding", total=total, unit=" runs") as bar:
        for _ in range(ROUNDS.value):
            for method in methods:
                bar.set_postfix_str(method.name, refresh=False)
                texts[method] = decoder.decode(
                    method, prompts, options, reference=texts.get(GREEDY)
                )
                seconds[method].append(sum(text.seconds for text in texts[method]))
                bar.update(1)
    found = {}
    plain = statistics.median(seconds[GREEDY])
    bpd = parse_method("bpd")
    base = texts[bpd if bpd in texts else GREEDY]
    batch = min(options.batch_size, len(prompts))
    for method in methods:
        took = statistics.median(seconds[method])
        calls = [text.serial_calls for text in texts[method]]
        # A batch takes as many turns as its slowest row.
        begins = range(0, len(prompts), batch)
        turns = sum(max(calls[begin : begin + batch]) for begin in begins)
        prefill = prefill_seconds(decoder, method, prompts, options, texts[GREEDY])
        call = (took - len(begins) * prefill) / turns
        drafting = 0.0
        if method != GREEDY:
            drafting = measure_drafting(decoder, method, prompts[0], batch)
        apart = differences(decoder.model, decoder.params, texts[GREEDY], texts[method])
        ties = sum(difference.near_tie for difference in apart)
        found[method.name] = {
            "block_efficiency": block_efficiency(texts[method]),
            "gain": block_efficiency(texts[method]) / block_efficiency(base) - 1,
            "gain_over": "bpd" if bpd in texts else "greedy",
            "paired_interval": paired_interval(texts[method], base),
            "tokens_per_second": sum(len(t.output_ids) for t in texts[method]) / took,
            "slowest_seconds": max(seconds[method]),
            "fastest_seconds": min(seconds[method]),
            "speedup": plain / took,
            "ms_prefill": 1e3 * prefill,
            "ms_per_serial_call": 1e3 * call,
            "ms_drafting_alone": 1e3 * drafting,
            "drafting_share_of_call": drafting / call,
            "nodes_per_call": draft_statistics(texts[method]).nodes,
            "texts_that_differ": len(apart),
            "of_them_near_ties": ties,
            "verification": {
                layout: verification_memory(
                    decoder,
                    method,
                    prompts,
                    dataclasses.replace(options, verification=layout),
                    texts[GREEDY],
                )
                for layout in VERIFICATIONS
            },
        }
    return found


def prefill_state(
    decoder: Decoder,
    method: Method,
    prompts: list[np.ndarray],
    options: DecodeOptions,
    greedy: list[Generation],
) -> tuple[Task, DecodeState]:
    """The first batch before its first serial call."""
    task = decoder.task(method, options, greedy if method.is_oracle else None)
    batch = min(options.batch_size, len(prompts))
    state = task.prefill(
        prompts, range(batch), task.rows(batch), options.max_new_tokens
    )
    return task, jax.block_until_ready(state)


def prefill_seconds(
    decoder: Decoder,
    method: Method,
    prompts: list[np.ndarray],
    options: DecodeOptions,
    greedy: list[Generation],
) -> float:
    """Median seconds of running the prompts of a batch."""
    times = []
    for _ in range(max(ROUNDS.value, 3)):
        start = time.perf_counter()
        prefill_state(decoder, method, prompts, options, greedy)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def verification_memory(
    decoder: Decoder,
    method: Method,
    prompts: list[np.ndarray],
    options: DecodeOptions,
    greedy: list[Generation],
) -> dict[str, int | str]:
    """Nodes that are laid out, and the memory of the compiled loop in bytes."""
    drafter = decoder.drafter(method)
    memory: dict[str, int | str] = {
        "nodes_laid_out": laid_out(drafter, options.verification)
    }
    if not drafter.on_device:
        why = "the loop is no single program: drafts are made on the host"
        return {**memory, "not_measured": why}
    task, state = prefill_state(decoder, method, prompts, options, greedy)
    compiled = decode_on_device.lower(
        task.model, task.weights, task.drafter, state, options.step
    ).compile()
    analysis = compiled.memory_analysis()
    return {
        **memory,
        "temporary_bytes": analysis.temp_size_in_bytes,
        "aliased_bytes": analysis.alias_size_in_bytes,
    }


def errors(row: dict[str, Any]) -> int:
    """Texts that differ from plain decoding by more than rounding."""
    return int(row["texts_that_differ"] - row["of_them_near_ties"])


def verdict(row: dict[str, Any]) -> str:
    """How the texts compare with plain decoding, in words."""
    if errors(row):
        return f"{errors(row)} DIFFER"
    ties = row["of_them_near_ties"]
    return f"{ties} near ties" if ties else "equal"


def random_model(path: str, config: DecodeConfig) -> tuple[Decoder, list[np.ndarray]]:
    """A model of random weights, an n-gram model if one is named, random prompts."""
    sizes = configuration.parse([path], [], BlockwiseConfig).value
    params = init_parameters(sizes, jax.random.key(0), make_mesh(MeshConfig()))
    name = flags.FLAGS["ngram"].value
    assets = Assets(ngram=ngram_files.load_model(name) if name else None)
    decoder = Decoder(
        ModelFunctions(sizes),
        params,
        width=config.lattice_width,
        alpha=config.alpha,
        assets=assets,
    )
    shape = NUM_PROMPTS.value, PROMPT_TOKENS.value
    tokens = np.random.default_rng(0).integers(0, sizes.trunk.vocab_size, shape)
    return decoder, list(tokens.astype(np.int32))


def main() -> None:
    """Measures, prints, writes."""
    config = decode_flags.config()
    if RANDOM_MODEL.value:
        decoder, prompts = random_model(RANDOM_MODEL.value, config)
    else:
        lm, decoder, config = decode_flags.load(config)
        loaded = lm.loaded
        prompts = [loaded.encode_prompt(t) for t in decode_flags.prompt_texts()]
        if not prompts:
            prompts = loaded.held_out(NUM_PROMPTS.value, PROMPT_TOKENS.value)
    options = config.options
    if options.temperature != 0:
        raise UserError("the benchmark decodes greedily: leave --temperature at 0.")
    methods = list(dict.fromkeys([GREEDY, *map(parse_method, METHODS.value)]))
    for method in methods:
        decoder.drafter(method)
        decoder.check(method, prompts, options)
    found = measure(decoder, methods, prompts, options)
    batch = min(options.batch_size, len(prompts))
    length = PROMPT_TOKENS.value + options.max_new_tokens
    passes = measure_passes(decoder, batch, length)
    result = {
        "command": " ".join(["python -m benchmarks.decoding", *sys.argv[1:]]),
        "date": provenance.today(),
        "device": provenance.device(),
        "versions": provenance.versions(),
        "precision": decoder.model.config.trunk.dtype,
        "prompts": len(prompts),
        "new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "verification": options.verification,
        "ms_of_a_pass": {size: 1e3 * s for size, s in passes.seconds.items()},
        "methods": found,
    }
    text = json.dumps(result, indent=2)
    with files.replacing_file(pathlib.Path(OUTPUT.value)) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    over = found[GREEDY.name]["gain_over"]
    print(
        f"{'method':<30} tokens/call  gain over {over:<16} ms/call  drafting  "
        "tokens/s  speed-up  text"
    )
    for name, row in found.items():
        low, high = row["paired_interval"]
        gain = f"{100 * row['gain']:+.1f} % ({100 * low:+.1f} … {100 * high:+.1f})"
        print(
            f"{name:<30} {row['block_efficiency']:>11.2f}  {gain:<26} "
            f"{row['ms_per_serial_call']:>7.2f} {row['ms_drafting_alone']:>9.2f} "
            f"{row['tokens_per_second']:>9.0f} {row['speedup']:>9.2f}  {verdict(row)}"
        )
    print(f"written to {OUTPUT.value} ({jax.default_backend()})")
    wrong = [name for name, row in found.items() if errors(row)]
    if wrong:
        raise UserError(
            f"texts differ from plain decoding by more than a near tie under "
            f"{', '.join(wrong)}: these methods are not lossless here."
        )


if __name__ == "__main__":
    cli.run(main)
