"""Compares decoding methods on held-out text and verifies that their texts agree.

    python -m bpd_jax.evaluate --model=runs/demo --methods=bpd,ngram:16,oracle

Every method's output is compared with plain greedy decoding, token for token. A
difference that rounding does not explain ends the run with exit status 1.

After compilation the methods alternate for `--rounds` rounds; the speed-up of a method
is the median over rounds of greedy decoding's time divided by the method's. `auto` in
`--methods` is the method that `bpd_jax.tune` chose on this device, or, if it has not
run, the fastest of the table.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence

import numpy as np
from absl import flags
from rich.text import Text

from bpd_jax import api
from bpd_jax.base import cli, progress, provenance
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.compare import (
    MethodResult,
    compare,
    compile_methods,
    fail_on_errors,
    fastest,
)
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.generate import compile_task, padded_prompts, stream
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import AUTO, Method
from bpd_jax.decoding.options import DecodeConfig, DecodeOptions
from bpd_jax.evaluation import decode_flags, prompt_flags
from bpd_jax.evaluation.block_views import most_improved_block
from bpd_jax.models.parameters import count_parameters
from bpd_jax.reporting import evaluation_records
from bpd_jax.reporting.decode_records import decode_records, visible
from bpd_jax.reporting.evaluation_report import page_of, print_table
from bpd_jax.reporting.page import write_page
from bpd_jax.reporting.records import DecodeRecord, EvaluationReport
from bpd_jax.reporting.terminal import print_stream, standard_output, write
from bpd_jax.storage import files, folders
from bpd_jax.storage.paths import as_path
from bpd_jax.training import hosts, metrics, process_flags

flags.set_default(
    prompt_flags.METHODS,
    [
        "bpd",
        "zero_gram:16",
        "ngram:1",
        "ngram:16",
        "ngram:32:search=best:adaptive=1",
        "oracle",
    ],
)
ROUNDS = flags.DEFINE_integer(
    "rounds", 1, "number of times that all methods decode all prompts.", lower_bound=1
)
SHOW = flags.DEFINE_string(
    "show",
    None,
    "method whose answer to the first prompt is printed first, with accepted draft "
    "tokens marked; it need not be one of --methods.",
)
OUTPUT = cli.DEFINE_path(
    "output",
    None,
    "folder for report.html, report.json, records.jsonl; default: "
    "evaluation/ in the run folder.",
)
TITLE = flags.DEFINE_string(
    "title", "Blockwise parallel decoding", "title of the report."
)


_KIND = folders.FolderKind(
    "a report of evaluate", "report.json", ("report.html", "records.jsonl"), '"methods"'
)
# Number of prompts in the report; records.jsonl contains all.
_SHOWN_PROMPTS = 12


def main() -> None:
    """Decodes with every method, compares the texts, and writes the report."""
    methods = prompt_flags.methods()
    config = decode_flags.config()
    if config.options.temperature != 0:
        raise UserError(
            "evaluate compares every method with greedy decoding: the temperature must "
            "be 0."
        )
    if set(methods) == {AUTO}:
        raise UserError(
            "--methods=auto has no methods to choose from: add some by name."
        )
    shown = parse_method(SHOW.value) if SHOW.value else None
    if OUTPUT.value:
        folders.check_folder(OUTPUT.value, _KIND)
    loaded, decoder, config = decode_flags.load(config)
    output = as_path(OUTPUT.value or loaded.folder / "evaluation")
    folders.check_folder(output, _KIND)
    options = config.options
    prompts, texts = prompt_flags.prompts(loaded)
    source = ", ".join(decode_flags.PROMPTS_FILE.value)
    if not texts:
        assert loaded.task is not None
        source = f"{loaded.task.name}, held-out documents"
    uses_auto, automatic = AUTO in methods, None
    if uses_auto:
        automatic = api.tuned_method(loaded, options.batch_size)
        methods = [method for method in methods if method != AUTO]
        methods += [] if automatic is None else [automatic]
    for method in [*methods, *([shown] if shown else [])]:
        decoder.check(method, prompts, options)
    decode_flags.print_mesh(*(decoder.task(method, options) for method in methods))
    if shown is not None:
        _show(loaded, decoder, shown, prompts, texts, options)
    results = _compare(decoder, methods, prompts, config)
    if uses_auto:
        automatic = automatic or fastest(results).method
    report = _write(
        output, loaded, decoder, options, results, source, texts or None, automatic
    )
    print_table(report)
    print(f"report: {output / 'report.html'}")
    fail_on_errors(results, output / "records.jsonl")
    if (best := report.fastest) is not None:
        print(f"Fastest: {best.marked_label} · {best.speedup:.2f} ×")


def _show(
    lm: api.LanguageModel,
    decoder: Decoder,
    method: Method,
    prompts: Sequence[np.ndarray],
    texts: Sequence[str],
    options: DecodeOptions,
) -> None:
    """Prints the answer to the first prompt while `method` decodes it."""
    console, prompt = standard_output(), prompts[0]
    task = decoder.prepare(method, [prompt], options)
    # The same shapes as in the comparison, so that programs are compiled once.
    padded = padded_prompts(prompts)
    with progress.bar(label="compiling", total=1, unit=" methods") as bar:
        bar.set_postfix_str(method.name)
        compile_task(task, [prompt], padded=padded)
        bar.update(1)
    tokens = visible(prompt, options)
    prompted = texts[0] if texts else lm.tokenizer.decode(tokens)
    write(f"\n{prompted}\n\n", console, "dim")
    pieces = api.marked_pieces(lm, stream(task, prompt, padded=padded), options)
    generation = print_stream(pieces, console)
    assert generation is not None
    console.print(
        Text(
            f"\n{method.name}: {len(generation.output_ids)} tokens in "
            f"{generation.serial_calls} calls of the model, "
            f"{generation.block_efficiency:.2f} per call. Marked tokens are accepted "
            "draft tokens; plain decoding needs a call for each.\n",
            style="dim",
        )
    )


def _compare(
    decoder: Decoder,
    methods: Sequence[Method],
    prompts: Sequence[np.ndarray],
    config: DecodeConfig,
) -> list[MethodResult]:
    """Compiles all methods, then decodes; both have a progress bar."""
    count = len({*methods, GREEDY})
    total = len({GREEDY, *(m for m in methods if not m.is_oracle)})
    with progress.bar(label="compiling", total=total, unit=" methods") as bar:
        ready = functools.partial(progress.advance, bar)
        compile_methods(decoder, methods, prompts, config.options, ready)
    decodings = len(prompts) * count * ROUNDS.value
    with decode_flags.token_bar("decoding", decodings, config) as bar:
        advance = functools.partial(progress.advance, bar)
        return compare(
            decoder, methods, prompts, config.options, advance, rounds=ROUNDS.value
        )


def _write(
    output: pathlib.Path,
    loaded: LanguageModel,
    decoder: Decoder,
    options: DecodeOptions,
    results: list[MethodResult],
    source: str,
    texts: list[str] | None,
    automatic: Method | None,
) -> EvaluationReport:
    """Writes the report, its data and the records; returns the report."""
    tokenizer, config = loaded.tokenizer, loaded.config
    records: list[DecodeRecord] = []
    for result in results:
        records += decode_records(
            result.method.name,
            result.generations,
            tokenizer.decode,
            tokenizer.piece,
            options,
            texts,
            continuation=tokenizer.continuation,
        )
    picture = None
    if (block := most_improved_block(decoder, results)) is not None:
        picture = evaluation_records.lattice_picture(
            block, tokenizer.decode, tokenizer.piece
        )
    trunk, ngram = config.trunk, decoder.ngram
    sizes = "none"
    if ngram is not None:
        sizes = f"{sum(ngram.sizes):,}, order {ngram.order}"
    report = EvaluationReport(
        title=TITLE.value,
        created=provenance.today(),
        task=source,
        device=provenance.device(),
        methods=evaluation_records.summaries(results, automatic),
        records=[r for r in records if r.prompt_index < _SHOWN_PROMPTS],
        model={
            "run": loaded.name,
            **({} if loaded.step is None else {"checkpoint": f"step {loaded.step:,}"}),
            "parameters": f"{count_parameters(config)['total']:,}",
            "trunk": f"{trunk.num_layers} layers, {trunk.d_model} / {trunk.d_ff} wide",
            "block heads": config.block_size,
            "vocabulary": f"{trunk.vocab_size:,} tokens",
            "precision": decoder.model.precision,
        },
        settings={
            "prompts": len(results[0].generations),
            "new tokens per prompt": f"up to {options.max_new_tokens}",
            "lattice width (k)": decoder.width,
            "weight of the refiners (α)": decoder.alpha,
            "n-grams": sizes,
            "prompts decoded together": options.batch_size,
            "rounds": ROUNDS.value,
            "verification": options.verification,
        },
        versions=provenance.versions(),
        lattice=picture,
        curves=[
            metrics.finite(row)
            for row in metrics.read_rows(loaded.folder / metrics.FILE_NAME)
        ],
    )

    def write() -> None:
        with folders.replacing_folder(output, _KIND) as folder:
            about = dataclasses.asdict(report)
            files.write_json(folder / "report.json", about, indent=1)
            write_page(page_of(report), folder / "report.html")
            lines = [json.dumps(dataclasses.asdict(each)) + "\n" for each in records]
            files.write_text(folder / "records.jsonl", "".join(lines))

    hosts.first(write)
    return report


if __name__ == "__main__":
    process_flags.run(main)
