"""Measures which decoding method is fastest for a model on this device.

    python -m bpd_jax.tune --model=runs/demo --prompts_file=mine.txt --seconds=120

Decodes the prompts, or held-out ones, with plain decoding and each of `--methods` in
turn, in rounds, until `--seconds` are used, and prints tokens per call and speed-ups
with their intervals. It saves two results in the run folder (`drafting.json`): the
fastest method, which `--method=auto` uses for the same batch size, and the accuracies
of each head's candidates, from which `decode` and `evaluate` compute the shape of
Medusa trees.
"""

import dataclasses
import functools
import pathlib

from absl import flags

from bpd_jax.base import progress, provenance
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.asset_files import TUNING, TUNING_FORMAT
from bpd_jax.decoding.choice import Choice, candidate_methods, priced
from bpd_jax.decoding.compare import MethodResult, compare, compile_methods
from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.decoding.replay import record
from bpd_jax.evaluation import decode_flags, prompt_flags
from bpd_jax.evaluation.efficiency import block_efficiency, speedup_interval
from bpd_jax.reporting.terminal import print_rows
from bpd_jax.storage import files
from bpd_jax.training import hosts, process_flags

SECONDS = flags.DEFINE_float(
    "seconds",
    60.0,
    "time for decoding with all methods; after a first round, which is always "
    "completed, rounds begin until it is used.",
    lower_bound=0,
)
flags.set_default(prompt_flags.NUM_PROMPTS, 8)

# Minimum number of guesses of a head for an estimate of its accuracy, and number of
# ranks that a Medusa tree considers.
_LEAST_GUESSES, _RANKS = 50, 10


def main() -> None:
    """Measures the methods, prints a table, and saves the choice."""
    methods = prompt_flags.methods()
    loaded, decoder, config = decode_flags.load(decode_flags.config())
    options = config.options
    if options.temperature != 0:
        raise UserError("tune decodes greedily: the temperature must be 0.")
    prompts, _ = prompt_flags.prompts(loaded, least=options.batch_size)
    methods = methods or candidate_methods(decoder, prompts, options)
    for method in methods:
        decoder.check(method, prompts, options)
    methods = priced(decoder, methods, prompts, options)
    total = len({GREEDY, *(m for m in methods if not m.is_oracle)})
    with progress.bar(label="compiling", total=total, unit=" methods") as bar:
        ready = functools.partial(progress.advance, bar)
        compile_methods(decoder, methods, prompts, options, ready)
    with decode_flags.token_bar("decoding", len(prompts) * total, config) as bar:
        advance = functools.partial(progress.advance, bar)
        results = compare(
            decoder, methods, prompts, options, advance, seconds=SECONDS.value
        )
    choice = Choice.among(results)
    batch = min(options.batch_size, len(prompts))
    _print(results, choice, batch)
    path = loaded.folder / TUNING
    texts, width = results[0].generations, max(_RANKS, decoder.width)
    whole = dataclasses.replace(options, batch_size=len(prompts))
    try:
        replay = record(decoder, texts, whole, width=width)
        accuracies = replay.accuracies(_RANKS, _LEAST_GUESSES)
    except UserError as error:
        raise UserError(
            f"{path} was not written: {error} See --num_prompts and --max_new_tokens."
        ) from error
    facts = {
        "format": TUNING_FORMAT,
        "accuracies": accuracies,
        "heads": loaded.heads_identity,
        "date": provenance.today(),
        "device": provenance.device(),
        "versions": provenance.versions(),
        "choices": {str(options.batch_size): choice.method.name},
        "measured": [_facts(result, results[0], batch) for result in results],
    }
    hosts.first(lambda: _write(path, facts))
    print(f"the choice and the accuracies of the heads: {path}")


def _facts(result: MethodResult, plain: MethodResult, batch: int) -> dict[str, object]:
    return {
        "method": result.method.name,
        "tokens_per_call": block_efficiency(result.generations),
        "speedup": result.speedup(plain),
        "interval": speedup_interval(plain.text_seconds, result.text_seconds, batch),
        "rounds": len(result.text_seconds),
        "texts_that_differ": len(result.differences),
    }


def _print(results: list[MethodResult], choice: Choice, batch: int) -> None:
    plain, *_ = results

    def row(result: MethodResult) -> list[str]:
        low, high = speedup_interval(plain.text_seconds, result.text_seconds, batch)
        return [
            result.method.name,
            f"{block_efficiency(result.generations):.2f}",
            f"{result.speedup(plain):.2f}",
            f"{low:.2f} … {high:.2f}",
        ]

    ordered = sorted(results, key=lambda result: -(result.speedup(plain) or 0.0))
    print_rows(
        ["Method", "Tokens\nper call", "Speed-up", "95 %\ninterval"],
        map(row, ordered),
        title=f"batch size {batch}, {len(plain.text_seconds)} rounds",
        strong=[choice.method.name],
        frame=False,
    )
    print(f"Choice: {choice}")


def _write(path: pathlib.Path, facts: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, facts)


if __name__ == "__main__":
    process_flags.run(main)
