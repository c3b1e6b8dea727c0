"""Compares decoding methods on held-out text, and proves that they agree.

    python -m bpd_jax.evaluate --model=runs/demo --methods=bpd,ngram:16,oracle

Every method's output is compared with plain greedy decoding, token for token. A
difference that rounding does not explain ends the run with exit status 1.
"""

import json
import pathlib

from absl import flags

from bpd_jax import cli, decode_flags, files
from bpd_jax.data.prompts import read_prompts_file
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.loading import LoadedModel
from bpd_jax.decoding.methods import parse_method
from bpd_jax.decoding.options import EXACT, DecodeOptions
from bpd_jax.errors import UserError
from bpd_jax.evaluation.blocks import telling_block
from bpd_jax.evaluation.compare import MethodResult, compare
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

# Prompts that the report shows step by step; records.jsonl holds all.
_SHOWN_PROMPTS = 12


def main() -> None:
    """Reads the flags, decodes by every method, checks, prints, writes."""
    methods = [parse_method(name) for name in METHODS.value if name.strip()]
    config = decode_flags.config()
    _check_options(config.options)
    loaded, decoder, config = decode_flags.load(config)
    options = config.options
    for method in methods:
        decoder.drafter(method)
    prompts_file = decode_flags.PROMPTS_FILE.value
    if prompts_file:
        texts = read_prompts_file(prompts_file)
        prompts = [loaded.encode_prompt(text) for text in texts]
        source = prompts_file
    else:
        prompts = loaded.held_out(NUM_PROMPTS.value, PROMPT_TOKENS.value)
        source = f"{loaded.task.name}, held-out documents"

    count = len({*methods, GREEDY})
    with decode_flags.token_bar("decoding", len(prompts) * count, config) as bar:

        def advance(label: str, tokens: int) -> None:
            bar.set_postfix_str(label, refresh=False)
            bar.update(tokens)

        results = compare(decoder, methods, prompts, options, advance)
    output = pathlib.Path(OUTPUT.value or loaded.folder / "evaluation")
    report = _write(output, loaded, decoder, options, results, source)
    print_table(report)
    print(f"report: {output / 'report.html'}")
    _fail_on_errors(results, output)


def _check_options(options: DecodeOptions) -> None:
    if options.acceptance != EXACT:
        raise UserError(
            "methods are compared token for token, which needs --acceptance=exact: "
            f"{options.acceptance} acceptance gives every method a text of its own."
        )


def _write(
    output: pathlib.Path,
    loaded: LoadedModel,
    decoder: Decoder,
    options: DecodeOptions,
    results: list[MethodResult],
    source: str,
) -> Report:
    """Writes the report, its data and the records; returns the report."""
    tokenizer, config = loaded.tokenizer, loaded.functions.config
    records: list[DecodeRecord] = []
    for result in results:
        records += build.decode_records(
            result, tokenizer.decode, tokenizer.piece, tokenizer.end_of_text, options
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
            "run": loaded.folder.name,
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
            "weight of the second opinion (α)": decoder.alpha,
            "n-grams": _ngram_size(decoder),
            "prompts decoded together": options.batch_size,
            "verification": options.verification,
        },
        versions=build.versions(),
        lattice=picture,
        curves=build.training_curves(loaded.folder / "metrics.jsonl"),
    )
    with files.replacing_folder(output) as folder:
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


def _fail_on_errors(results: list[MethodResult], output: pathlib.Path) -> None:
    """Raises if any output differs from greedy decoding by more than rounding."""
    for result in results:
        for error in result.errors:
            raise UserError(
                f"NOT LOSSLESS: {result.label} differs from greedy decoding on prompt "
                f"{error.prompt_index + 1} at token {error.position + 1}, where the "
                f"two best logits are {error.gap:.2g} apart, which rounding does not "
                f"explain; this is a defect of bpd_jax, please report it with "
                f"{output / 'records.jsonl'}."
            )


if __name__ == "__main__":
    cli.run(main)
