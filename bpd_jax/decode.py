"""Decodes prompts with a trained model.

    python -m bpd_jax.decode --model=runs/demo --prompt="def add(a, b):"
    python -m bpd_jax.decode --method=help
    python -m bpd_jax.decode --model=runs/demo --prompts_file=prompts.jsonl \\
        --method=ngram:16 --gin_file=gin_configs/runs/decode.gin --output=out.jsonl

The answer to a single prompt is streamed; several prompts are decoded in batches.
"""

import json
import os
import sys
from collections.abc import Sequence

import numpy as np
from absl import flags
from rich.console import Console
from rich.text import Text

from bpd_jax import api, cli, decode_flags, files, progress
from bpd_jax.data.prompts import check_not_empty
from bpd_jax.decoding.asset_files import own_tuning
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import (
    Generation,
    check_prompts,
    compile_task,
    stream,
)
from bpd_jax.decoding.loading import LoadedModel
from bpd_jax.decoding.methods import Method, describe_methods, parse_method
from bpd_jax.decoding.options import DecodeConfig
from bpd_jax.decoding.payoff import candidate_methods, choose_method, tuned_choice
from bpd_jax.errors import UserError
from bpd_jax.evaluation.compare import MethodResult
from bpd_jax.reporting import build
from bpd_jax.reporting.build import decode_records
from bpd_jax.reporting.records import DecodeRecord
from bpd_jax.reporting.terminal import print_steps, print_stream, standard_output

PROMPT = flags.DEFINE_string("prompt", None, "text to continue.")
METHOD = flags.DEFINE_string(
    "method",
    None,
    "how to draft, as in ngram:16; auto measures which is fastest; help lists all. "
    "Default: a tree of the block drafter's drafts if the model has one, with prompt "
    "lookup; else bpd with block heads, and prompt_lookup without.",
)
SHOW_ACCEPTED = flags.DEFINE_bool(
    "show_accepted",
    False,
    "mark accepted draft tokens in the answer to a single prompt: green, or in "
    "brackets where there is no colour.",
)
OUTPUT = flags.DEFINE_string("output", None, "JSON Lines file, in prompt order.")
SHOW_STEPS = flags.DEFINE_bool(
    "show_steps", False, "print the winning draft of every serial call."
)

_OUTPUT_FIELDS = (
    "prompt",
    "input_ids",
    "output_ids",
    "text",
    "serial_calls",
    "block_efficiency",
    "seconds",
)


def main() -> None:
    """Reads the flags, decodes, prints or writes."""
    if METHOD.value == "help":
        print(describe_methods())
        return
    config = decode_flags.config()
    asked = METHOD.value or config.method
    if asked:
        parse_method(asked)  # Validates it before loading the model.
    texts = _prompts(PROMPT.value)
    if OUTPUT.value:
        files.check_writable(OUTPUT.value)
    loaded, decoder, config = decode_flags.load(config)
    prompts = [loaded.encode_prompt(text) for text in texts]
    method = parse_method(asked or decoder.default_method)
    if method.kind == "auto":
        check_prompts(loaded.functions, prompts, config.options)
        method = _measured(loaded, decoder, prompts, config)
    # Validates the request before anything is compiled.
    decoder.check(method, prompts, config.options)
    if len(prompts) == 1 and not OUTPUT.value:
        generations = [_streamed(loaded, decoder, method, prompts[0], config)]
    else:
        with decode_flags.token_bar("decoding", len(prompts), config) as bar:
            generations = decoder.decode(
                method, prompts, config.options, on_progress=bar.update
            )
    _show(loaded, decoder, method, generations, config, texts)


def _show(
    loaded: LoadedModel,
    decoder: Decoder,
    method: Method,
    generations: list[Generation],
    config: DecodeConfig,
    texts: list[str],
) -> None:
    """Prints or writes what was decoded, and a line of figures."""
    tokenizer = loaded.tokenizer
    result = MethodResult(method, decoder.label(method), generations, [])
    records = decode_records(
        result, tokenizer.decode, tokenizer.piece, config.options, texts
    )
    if OUTPUT.value:
        write_records(OUTPUT.value, records)
    else:
        between = _between(loaded) if len(records) > 1 else None
        _print_records(records, between)
    tokens = sum(len(record.output_ids) for record in records)
    calls = sum(record.serial_calls for record in records)
    seconds = sum(record.seconds for record in records)
    print(
        f"{method.name}: {tokens} tokens in {calls} serial calls, block efficiency "
        f"{tokens / max(calls, 1):.2f}, {seconds:.2f} s"
        + ("" if config.options.lossless else " (typical acceptance: LOSSY)")
        + (f"; written to {OUTPUT.value}" if OUTPUT.value else "")
    )


def _prompts(prompt: str | None) -> list[str]:
    files_given = bool(decode_flags.PROMPTS_FILE.value)
    if prompt is not None and not files_given:
        check_not_empty([prompt])
        return [prompt]
    if files_given and prompt is None:
        return decode_flags.prompt_texts()
    raise UserError("give exactly one of --prompt and --prompts_file.")


def _measured(
    loaded: LoadedModel,
    decoder: Decoder,
    prompts: list[np.ndarray],
    config: DecodeConfig,
) -> Method:
    """The method that is fastest here, with a word about why."""
    tuning, size = own_tuning(loaded), config.options.batch_size
    found = None if tuning is None else tuned_choice(tuning, build.device(), size)
    if found is not None:
        print(f"auto: {found.name}, as bpd_jax.tune found on this device.")
        return found
    methods = candidate_methods(decoder, prompts, config.options)
    print(
        f"auto: trying up to {len(methods)} methods, which may take minutes; python -m "
        "bpd_jax.tune does it once and for all.",
        file=sys.stderr,
    )
    with progress.bar(label="trying", total=len(methods) + 1, unit=" methods") as bar:

        def advance(method: Method) -> None:
            bar.set_postfix_str(method.name, refresh=False)
            bar.update(1)

        choice = choose_method(
            decoder, prompts, config.options, methods=methods, on_progress=advance
        )
    print(f"auto: {choice}")
    return choice.method


def _streamed(
    loaded: LoadedModel,
    decoder: Decoder,
    method: Method,
    prompt: np.ndarray,
    config: DecodeConfig,
) -> Generation:
    """Decodes one prompt and prints its text as it comes."""
    lm = api.LanguageModel(loaded, decoder.assets)
    task = decoder.prepare(method, [prompt], config.options)
    console = standard_output()
    # Compiles, so that the text flows and its seconds are those of decoding.
    with console.status("compiling"):
        compile_task(task, [prompt])
    prompted = (PROMPT.value or "") + _between(loaded)
    console.print(Text(prompted, style="dim"), end="", soft_wrap=True)
    pieces = api.marked_pieces(lm, stream(task, prompt), config.options)
    marked = SHOW_ACCEPTED.value
    found = print_stream(
        ((piece, marked and accepted, last) for piece, accepted, last in pieces),
        console,
    )
    console.print()
    assert found is not None
    return found


def _between(loaded: LoadedModel) -> str:
    """What stands between a prompt and what follows: an answer, or more of a text."""
    return "\n\n" if loaded.chat else ""


def _print_records(records: Sequence[DecodeRecord], between: str | None) -> None:
    """Prints texts, unless there is nothing to put between; and drafts, if asked."""
    console = Console(highlight=False, soft_wrap=True)
    for record in records:
        if between is not None:
            console.print(Text(record.prompt + between, style="dim"), end="")
            console.print(Text(record.text))
            console.print()
        if SHOW_STEPS.value:
            print_steps(record, limit=len(record.steps))


def write_records(
    path: str | os.PathLike[str], records: Sequence[DecodeRecord]
) -> None:
    """Writes one JSON line per record, whole or not at all."""
    with files.replacing_file(path) as temporary:
        lines = [
            json.dumps({field: getattr(record, field) for field in _OUTPUT_FIELDS})
            for record in records
        ]
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    cli.run(main)
