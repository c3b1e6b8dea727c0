"""Decodes prompts with a trained model.

    python -m bpd_jax.decode --model=runs/demo --prompt="def add(a, b):"
    python -m bpd_jax.decode --method=help
    python -m bpd_jax.decode --model=runs/demo --prompts_file=prompts.jsonl \\
        --method=ngram:16 --gin_file=gin_configs/runs/decode.gin --output=out.jsonl

The answer to a single prompt is streamed; several prompts are decoded in batches.
"""

import json
from collections.abc import Sequence

from absl import flags

from bpd_jax import api
from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.data.text_readers import check_texts
from bpd_jax.decoding.generate import Generation, generate
from bpd_jax.decoding.method_text import describe_methods, parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeConfig
from bpd_jax.evaluation import decode_flags
from bpd_jax.reporting.answers import print_answer, speed_of
from bpd_jax.reporting.decode_records import decode_records
from bpd_jax.reporting.records import DecodeRecord
from bpd_jax.reporting.terminal import (
    print_steps,
    standard_output,
    write,
)
from bpd_jax.storage import files
from bpd_jax.training import hosts, process_flags

PROMPT = flags.DEFINE_string("prompt", None, "text to continue.")
METHOD = flags.DEFINE_string(
    "method",
    None,
    "method, such as ngram:16; auto measures which is fastest; help lists all. "
    "Default: with a drafter, a tree of its drafts and of prompt lookup; with "
    "block heads, bpd; otherwise prompt_lookup.",
)
SHOW_ACCEPTED = flags.DEFINE_bool(
    "show_accepted",
    False,
    "mark accepted draft tokens in the answer to a single prompt: green, or in "
    "brackets without colour.",
)
OUTPUT = cli.DEFINE_path(
    "output", None, "JSON Lines file for the answers, in the order of the prompts."
)
SHOW_STEPS = flags.DEFINE_bool(
    "show_steps", False, "print the winning draft of every serial call."
)

_OUTPUT_FIELDS = (
    *("prompt", "input_ids", "output_ids", "text"),
    *("serial_calls", "block_efficiency", "seconds"),
)


def main() -> None:
    """Reads the flags, decodes, prints or writes."""
    if METHOD.value == "help":
        print(describe_methods())
        return
    config = decode_flags.config()
    name = METHOD.value or config.method
    if name:
        parse_method(name)  # Validates the method before loading the model.
    if (PROMPT.value is None) == (not decode_flags.PROMPTS_FILE.value):
        raise UserError("give exactly one of --prompt and --prompts_file.")
    texts = decode_flags.prompt_texts() if PROMPT.value is None else [PROMPT.value]
    check_texts(texts)
    if OUTPUT.value:
        files.check_writable(OUTPUT.value)
    lm, decoder, config = decode_flags.load(config)
    prompts = [lm.encode(text) for text in texts]
    method = api.resolve(lm, decoder, name, prompts, config.options, verbose=True)
    # Validates the request before anything is compiled.
    task = decoder.prepare(method, prompts, config.options)
    decode_flags.print_mesh(task)
    if len(prompts) == 1 and not OUTPUT.value:
        console, shown = standard_output(), texts[0] + _between(lm)
        generations = [
            print_answer(
                lm, task, prompts[0], console, before=shown, marks=SHOW_ACCEPTED.value
            )
        ]
        console.print()
    else:
        with decode_flags.token_bar("decoding", len(prompts), config) as bar:
            generations = generate(task, prompts, on_progress=bar.update)
    _show(lm, method, generations, config, texts)


def _show(
    lm: api.LanguageModel,
    method: Method,
    generations: list[Generation],
    config: DecodeConfig,
    texts: list[str],
) -> None:
    """Prints or writes the texts, and a summary line."""
    tokenizer = lm.tokenizer
    records = decode_records(
        method.name,
        generations,
        tokenizer.decode,
        tokenizer.piece,
        config.options,
        texts,
        continuation=tokenizer.continuation,
    )
    if output := OUTPUT.value:
        lines = [
            json.dumps({field: getattr(record, field) for field in _OUTPUT_FIELDS})
            for record in records
        ]
        text = "".join(f"{line}\n" for line in lines)
        hosts.first(lambda: files.write_text(output, text))
    else:
        between = _between(lm) if len(records) > 1 else None
        _print_records(records, between)
    tokens = sum(len(record.output_ids) for record in records)
    calls = sum(record.serial_calls for record in records)
    seconds = sum(record.seconds for record in records)
    print(
        f"{method.name}: {speed_of(tokens, calls, seconds)}"
        + ("" if config.options.lossless else " (typical acceptance: LOSSY)")
        + (f"; written to {output}" if output else "")
    )


def _between(lm: api.LanguageModel) -> str:
    """The separator of a prompt and its completion: an empty line before an answer."""
    return "\n\n" if lm.chat else ""


def _print_records(records: Sequence[DecodeRecord], between: str | None) -> None:
    """Prints texts, if there is a separator, and drafts, if requested."""
    console = standard_output()
    for record in records:
        if between is not None:
            write(record.prompt + between, console, "dim")
            write(f"{record.text}\n\n", console)
        if SHOW_STEPS.value:
            print_steps(record, console, limit=len(record.steps))


if __name__ == "__main__":
    process_flags.run(main)
