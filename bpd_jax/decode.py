"""Decodes prompts with a trained model.

python -m bpd_jax.decode --model=runs/demo --prompt="def add(a, b):"
"""

import json
import os
from collections.abc import Sequence

from absl import flags
from rich.console import Console
from rich.text import Text

from bpd_jax import cli, files
from bpd_jax.data.prompts import read_prompts_file
from bpd_jax.decode_flags import (
    BATCH_SIZE,
    MAX_NEW_TOKENS,
    PROMPTS_FILE,
    make_decoder,
    token_bar,
)
from bpd_jax.decoding.generate import check_prompts
from bpd_jax.decoding.loading import load_model
from bpd_jax.decoding.methods import describe_methods, parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError
from bpd_jax.evaluation.compare import MethodResult
from bpd_jax.reporting.build import decode_records
from bpd_jax.reporting.records import DecodeRecord
from bpd_jax.reporting.terminal import print_steps

PROMPT = flags.DEFINE_string("prompt", None, "text to continue.")
METHOD = flags.DEFINE_string(
    "method",
    "bpd",
    "how to draft, as in ngram:16; --method=help lists all.",
)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy, above 0 samples.")
SEED = flags.DEFINE_integer("seed", 0, "of the sampling noise.")
OUTPUT = flags.DEFINE_string("output", None, "JSON Lines file, in prompt order.")
SHOW_STEPS = flags.DEFINE_bool(
    "show_steps", False, "print the draft of every serial call."
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
    method = parse_method(METHOD.value)
    texts = _prompts(PROMPT.value, PROMPTS_FILE.value)
    loaded = load_model(cli.required("model"))
    tokenizer = loaded.tokenizer
    options = DecodeOptions(
        max_new_tokens=MAX_NEW_TOKENS.value,
        temperature=TEMPERATURE.value,
        end_of_text=tokenizer.end_of_text,
        seed=SEED.value,
        batch_size=BATCH_SIZE.value,
    )
    decoder = make_decoder(loaded)
    decoder.drafter(method)
    prompts = [loaded.encode_prompt(text) for text in texts]
    check_prompts(loaded.functions, prompts, options)
    with token_bar("decoding", len(prompts), options) as bar:
        generations = decoder.decode(method, prompts, options, on_progress=bar.update)
    result = MethodResult(method, decoder.label(method), generations, [])
    records = decode_records(
        result, tokenizer.decode, tokenizer.piece, tokenizer.end_of_text
    )
    if OUTPUT.value:
        write_records(OUTPUT.value, records)
    else:
        _print_records(records)
    tokens = sum(len(record.output_ids) for record in records)
    calls = sum(record.serial_calls for record in records)
    seconds = sum(record.seconds for record in records)
    print(
        f"{method.name}: {tokens} tokens in {calls} serial calls, block efficiency "
        f"{tokens / max(calls, 1):.2f}, {seconds:.2f} s"
        + (f"; written to {OUTPUT.value}" if OUTPUT.value else "")
    )


def _prompts(prompt: str | None, path: str | None) -> list[str]:
    if prompt is not None and path is None:
        return [prompt]
    if path is not None and prompt is None:
        return read_prompts_file(path)
    raise UserError("give exactly one of --prompt and --prompts_file.")


def _print_records(records: Sequence[DecodeRecord]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for record in records:
        console.print(Text(record.prompt, style="dim"), end="")
        console.print(Text(record.text))
        console.print()
        if SHOW_STEPS.value:
            print_steps(record)


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
