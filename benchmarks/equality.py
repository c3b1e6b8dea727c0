"""Greedy tokens of every method, in the loop and in replay, against plain decoding.

    python -m benchmarks.equality --model=runs/demo --batch_size=64
    python -m benchmarks.equality --model=smollm2 --prompts_file=prompts.jsonl \\
        --tokens=50000 --max_new_tokens=48 --batch_size=16

The methods are all sources of the registry with all searches, and the heads' lattice
also with all refiners; methods whose assets the model lacks are left out, with the
reason. Each decodes the same prompts, enough for `--tokens` tokens over all methods.
Every token is compared with that of plain greedy decoding, and the calls of replay with
those of the loop. Where texts differ, the gap is the difference of the logits of the
two tokens. Results are written after every method, and the same command resumes. It
fails if a difference is more than a near tie.
"""

import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from benchmarks import records
from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.compare import differences
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.replay import Replay, record
from bpd_jax.decoding.run_loading import held_out
from bpd_jax.drafting.parts import (
    DRAFTS,
    NODES,
    RefinerPart,
    SearchPart,
    SourcePart,
    StandalonePart,
    parts,
)
from bpd_jax.evaluation import decode_flags
from bpd_jax.storage import files

METHODS = flags.DEFINE_list(
    "methods", [], "methods to compare; default: all compositions of the registry."
)
TOKENS = flags.DEFINE_integer(
    "tokens", 1_000_000, "tokens compared in the loop, over all methods.", 1
)
PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "tokens of each prompt.", 1)
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/equality_cpu.json", "file.")

# Fields that must be equal for an earlier result to be resumed.
_SAME = ("model", "device", "versions", "prompts", "max_new_tokens", "batch_size")
_NUMBERS = {DRAFTS: ":4", NODES: ":16", "": ""}


def all_methods() -> Iterator[str]:
    """Yields the compositions of the registry that are compared.

    >>> "heads+ngram/best:4" in all_methods()
    True
    """
    searches = [
        f"{name}{_NUMBERS[part.counts]}" for name, part in parts(SearchPart).items()
    ]
    for name, source in parts(SourcePart).items():
        lattices = [name]
        if source.offers_lattice:
            lattices += [f"{name}+{refiner}" for refiner in parts(RefinerPart)]
        for lattice in lattices:
            yield from (f"{lattice}/{search}" for search in searches)
    yield from (name for name in parts(StandalonePart) if name != "none")
    yield from (f"heads+ngram/best:4:engine={name}" for name in ("device", "viterbi"))
    yield "heads+ngram:adaptive=1/tree:16+lookup:8"
    yield "block+ngram/tree:16+lookup:8"


def usable(
    names: Iterable[str],
    decoder: Decoder,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
) -> tuple[list[Method], dict[str, str]]:
    """Returns the methods that the model supports, and why it lacks the others."""
    methods: list[Method] = []
    left_out: dict[str, str] = {}
    for name in names:
        try:
            method = parse_method(name)
            decoder.drafter(method)
            decoder.check(method, prompts, options)
            methods.append(method)
        except UserError as error:
            left_out[name] = str(error)
    return methods, left_out


def compared(
    decoder: Decoder, plain: Sequence[Generation], other: Sequence[Generation]
) -> dict[str, Any]:
    """Counts the tokens in which `other` differs from `plain`, and the near ties.

    If the lengths differ, the tokens that only one text has count as differences.
    """
    differing = 0
    for a, b in zip(plain, other, strict=True):
        shared = min(len(a.output_ids), len(b.output_ids))
        differing += int((a.output_ids[:shared] != b.output_ids[:shared]).sum())
        differing += abs(len(a.output_ids) - len(b.output_ids))
    apart = differences(decoder.model, plain, other)
    return {
        "tokens": sum(len(text.output_ids) for text in plain),
        "tokens_that_differ": differing,
        "texts": len(plain),
        "texts_that_differ": len(apart),
        "of_them_near_ties": sum(difference.near_tie for difference in apart),
        "gaps": [
            difference.gap if math.isfinite(difference.gap) else None
            for difference in apart
        ],
    }


def compare(
    decoder: Decoder,
    method: Method,
    plain: Sequence[Generation],
    options: DecodeOptions,
    replay: Replay,
    replayer: Decoder,
) -> dict[str, Any]:
    """Decodes and replays by one method; returns its row of the result."""
    prompts = [text.input_ids for text in plain]
    texts = decoder.decode(method, prompts, options, reference=plain)
    row: dict[str, Any] = {"loop": compared(decoder, plain, texts)}
    calls = sum(text.serial_calls for text in texts)
    row["tokens_per_call"] = sum(len(text.output_ids) for text in texts) / calls
    try:
        replayed = replay.decode(method, replayer)
    except UserError as error:
        return {**row, "replay": None, "not_replayed": str(error)}
    row["replay"] = compared(decoder, plain, replayed)
    row["texts_with_other_calls"] = sum(
        not np.array_equal(a.accepted, b.accepted)
        for a, b in zip(texts, replayed, strict=True)
        if np.array_equal(a.output_ids, b.output_ids)
    )
    return row


def totals(rows: dict[str, Any]) -> dict[str, Any]:
    """Sums of the counts over all methods."""
    names = ("tokens", "tokens_that_differ", "texts", "texts_that_differ")
    names = (*names, "of_them_near_ties")
    sums: dict[str, Any] = {}
    for way in ("loop", "replay"):
        compared = [row[way] for row in rows.values() if row[way] is not None]
        sums[way] = {name: sum(counts[name] for counts in compared) for name in names}
    others = sum(row.get("texts_with_other_calls", 0) for row in rows.values())
    return {**sums, "texts_with_other_calls": others}


def _prompts(loaded: LanguageModel, methods: int, options: DecodeOptions) -> list:
    """The first `count` prompts, of the files or of the model's held-out text."""
    count = math.ceil(TOKENS.value / methods / options.max_new_tokens)
    texts = decode_flags.prompt_texts()
    if not texts:
        return held_out(loaded, count, PROMPT_TOKENS.value)
    if len(texts) < count:
        raise UserError(f"{count} prompts are needed and {len(texts)} were given.")
    return [loaded.encode_prompt(text) for text in texts[:count]]


def _earlier(path: pathlib.Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The rows of an earlier run with equal settings."""
    try:
        result = files.read_json(path)
        same = all(result[name] == facts[name] for name in _SAME)
        return dict(result["methods"]) if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def main() -> None:
    """Compares all methods; prints and writes the results."""
    lm, decoder, config = decode_flags.load(decode_flags.config())
    options = config.options
    if options.temperature != 0:
        raise UserError("the benchmark decodes greedily: leave --temperature at 0.")
    names = METHODS.value or list(all_methods())
    probe = [np.zeros(1, np.int32)]
    methods, left_out = usable(names, decoder, probe, options)
    if not methods:
        raise UserError(f"the model can decode by none of {', '.join(names)}.")
    prompts = _prompts(lm, len(methods), options)
    facts: dict[str, Any] = {
        **records.about("equality"),
        "model": lm.fingerprint,
        "precision": decoder.model.precision,
        "prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "left_out": left_out,
    }
    output = pathlib.Path(OUTPUT.value)
    rows = _earlier(output, facts)
    with decode_flags.token_bar("plain", len(prompts), config) as bar:
        plain = decoder.decode(GREEDY, prompts, options, on_progress=bar.update)
    replay = record(decoder, plain, options)
    replayer = replay.decoder(width=decoder.width, alpha=decoder.alpha)
    with progress.bar(label="comparing", total=len(methods), unit=" methods") as bar:
        for method in methods:
            bar.set_postfix_str(method.name, refresh=False)
            if method.name not in rows:
                row = compare(decoder, method, plain, options, replay, replayer)
                rows[method.name] = row
                records.write(output, {**facts, **totals(rows), "methods": rows})
            bar.update(1)
    _report(rows, output)


def _report(rows: dict[str, Any], output: pathlib.Path) -> None:
    for way, sums in totals(rows).items():
        print(f"{way}: {sums}")
    print(f"written to {output}")
    wrong = [
        name
        for name, row in rows.items()
        for way in (row["loop"], row["replay"] or {"texts_that_differ": 0})
        if way["texts_that_differ"] > way.get("of_them_near_ties", 0)
    ]
    if wrong:
        raise UserError(
            "texts differ from plain decoding by more than a near tie under "
            f"{', '.join(wrong)}."
        )


if __name__ == "__main__":
    cli.run(main)
