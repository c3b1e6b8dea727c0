"""Compares decoding methods on held-out text and verifies that their texts agree.

    python -m bpd_jax.evaluate --model=runs/demo --methods=bpd,ngram:16,oracle

Every method's output is compared with plain greedy decoding, token for token. A
difference that rounding does not explain ends the run with exit status 1.
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from bpd_jax import cli, decode_flags, folders
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.loading import LoadedModel
from bpd_jax.decoding.methods import Method, parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError
from bpd_jax.evaluation.blocks import telling_block
from bpd_jax.evaluation.compare import MethodResult, compare, fail_on_errors
from bpd_jax.models.blockwise import count_parameters
from bpd_jax.reporting import build
from bpd_jax.reporting.html import write_html
from bpd_jax.reporting.records import DecodeRecord, Report, save_report
from bpd_jax.reporting.terminal import print_table

METHODS = flags.DEFINE_list(
    "methods",
    [
        "bpd",
        "zero_gram:16",
        "ngram:1",
        "ngram:16",
        "ngram:32:search=best:adaptive=1",
        "oracle",
    ],
    "methods to compare with greedy decoding.",
)
NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 32, "held-out prompts to decode.")
PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "tokens of each of them.")
OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "folder for report.html, report.json, records.jsonl; default: "
    "evaluation/ in the run folder.",
)
TITLE = flags.DEFINE_string("title", "Blockwise parallel decoding", "of the report.")

_KIND = folders.FolderKind(
    "a report of evaluate", "report.json", ("report.html", "records.jsonl"), '"methods"'
)
# Prompts that the report shows step by step; records.jsonl holds all.
_SHOWN_PROMPTS = 12


def main() -> None:
    """Reads the flags, decodes by every method, checks, prints, writes."""
    methods = [parse_method(name) for name in METHODS.value if name.strip()]
    config = decode_flags.config()
    _check(methods, config.options)
    if OUTPUT.value:
        folders.check_folder(OUTPUT.value, _KIND)
    loaded, decoder, config = decode_flags.load(config)
    output = pathlib.Path(OUTPUT.value or loaded.folder / "evaluation")
    folders.check_folder(output, _KIND)
    options = config.options
    for method in methods:
        decoder.drafter(method)
    texts = decode_flags.prompt_texts()
    if texts:
        prompts = [loaded.encode_prompt(text) for text in texts]
        source = ", ".join(decode_flags.PROMPTS_FILE.value)
    else:
        prompts = loaded.held_out(NUM_PROMPTS.value, PROMPT_TOKENS.value)
        assert loaded.task is not None
        source = f"{loaded.task.name}, held-out documents"

    count = len({*methods, GREEDY})
    with decode_flags.token_bar("decoding", len(prompts) * count, config) as bar:

        def advance(label: str, tokens: int) -> None:
            bar.set_postfix_str(label, refresh=False)
            bar.update(tokens)

        results = compare(decoder, methods, prompts, options, advance)
    report = _write(output, loaded, decoder, options, results, source, texts or None)
    print_table(report)
    print(f"report: {output / 'report.html'}")
    fail_on_errors(results, output / "records.jsonl")


def _check(methods: Sequence[Method], options: DecodeOptions) -> None:
    """What can be refused before the model is loaded."""
    if options.temperature != 0:
        raise UserError(
            "evaluate compares every method with greedy decoding: leave the "
            "temperature at 0."
        )
    if any(method.kind == "auto" for method in methods):
        raise UserError(
            "evaluate compares methods by name: give those that auto would choose from."
        )


def _write(
    output: pathlib.Path,
    loaded: LoadedModel,
    decoder: Decoder,
    options: DecodeOptions,
    results: list[MethodResult],
    source: str,
    texts: list[str] | None,
) -> Report:
    """Writes the report, its data and the records; returns the report."""
    tokenizer, config = loaded.tokenizer, loaded.functions.config
    records: list[DecodeRecord] = []
    for result in results:
        records += build.decode_records(
            result, tokenizer.decode, tokenizer.piece, options, texts
        )
    block = telling_block(decoder, results)
    picture = None
    if block is not None:
        picture = build.lattice_picture(block, tokenizer.decode, tokenizer.piece)
    trunk = config.trunk
    report = Report(
        title=TITLE.value,
        created=build.today(),
        task=source,
        device=build.device(),
        methods=build.summaries(results),
        records=[r for r in records if r.prompt_index < _SHOWN_PROMPTS],
        model={
            "run": loaded.name,
            "parameters": f"{count_parameters(config)['total']:,}",
            "trunk": f"{trunk.num_layers} layers, {trunk.d_model} / {trunk.d_ff} wide",
            "block heads": config.block_size,
            "vocabulary": f"{trunk.vocab_size:,} tokens",
            "precision": trunk.dtype,
        },
        settings={
            "prompts": len(results[0].generations),
            "new tokens per prompt": f"up to {options.max_new_tokens}",
            "lattice width (k)": decoder.width,
            "weight of the refiners (α)": decoder.alpha,
            "n-grams": _ngram_size(decoder),
            "prompts decoded together": options.batch_size,
            "verification": options.verification,
        },
        versions=build.versions(),
        lattice=picture,
        curves=build.training_curves(loaded.folder / "metrics.jsonl"),
    )
    with folders.replacing_folder(output, _KIND) as folder:
        save_report(report, folder / "report.json")
        write_html(report, folder / "report.html")
        lines = [json.dumps(record.to_json()) for record in records]
        (folder / "records.jsonl").write_text(
            "".join(f"{line}\n" for line in lines), encoding="utf-8"
        )
    return report


def _ngram_size(decoder: Decoder) -> str:
    ngram = decoder.ngram
    return "none" if ngram is None else f"{sum(ngram.sizes):,}, order {ngram.order}"


if __name__ == "__main__":
    cli.run(main)
