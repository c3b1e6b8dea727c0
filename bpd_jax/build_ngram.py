"""Builds a back-off n-gram model and writes it in three formats.

From text or tokens: counts, Katz estimate, pruning.

    python -m bpd_jax.build_ngram --text='books/**/*.txt' --output=books_4gram
    python -m bpd_jax.build_ngram --tokens=ids.txt.gz --min_counts=1,1,2,4 \\
        --max_ngrams=1000000 --output=ids_4gram
    python -m bpd_jax.build_ngram --generations=runs/smollm2/texts \\
        --heldout_split=validation --output=runs/smollm2/ngram

From counts of `bpd_jax.count_ngrams`, or from models, to prune, convert or mix them.

    python -m bpd_jax.build_ngram --counts=books_counts --theta=1e-8 --output=books
    python -m bpd_jax.build_ngram --model=other.arpa.gz --output=other
    python -m bpd_jax.build_ngram --model=in_domain,general --weight=0.7 --output=mixed
"""

import re

from absl import flags
from rich.console import Console
from rich.table import Table

from bpd_jax import cli
from bpd_jax.errors import UserError
from bpd_jax.ngram_flags import (
    END_OF_TEXT,
    GENERATIONS,
    MAX_BYTES,
    SPLIT,
    TASK,
    TEXT,
    TOKENS,
    VOCAB_SIZE,
    VOCABULARY,
)
from bpd_jax.ngrams import storage
from bpd_jax.ngrams.build_model import BuildReport, Measure, Settings, build
from bpd_jax.ngrams.katz import DEFAULT_BINS

_COUNTS = flags.DEFINE_string(
    "counts", None, "Folder of counts, or a text file of lines `a b c<TAB>5`."
)
_MODEL = flags.DEFINE_list(
    "model",
    None,
    "A model to prune or convert, or two to mix: folders, ARPA or .fst files.",
)
_WEIGHT = flags.DEFINE_float("weight", None, "For --model=A,B: the share of A.")
_MODEL_SYMBOLS = flags.DEFINE_string(
    "model_symbols",
    None,
    "For --model: symbol table of files that hold strings. Default: token ids.",
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write the model to.")
_ORDER = flags.DEFINE_integer(
    "order", None, "Length N of the longest n-grams. Default: 4, or that of --counts."
)
_MAX_NGRAMS = flags.DEFINE_integer(
    "max_ngrams", None, "Prune to at most this many n-grams of all orders."
)
_THETA = flags.DEFINE_float(
    "theta",
    None,
    "Prune n-grams whose loss raises the perplexity by this factor or less: 1e-8.",
)
_MAX_PER_ORDER = flags.DEFINE_list(
    "max_per_order",
    None,
    "Prune to at most this many n-grams per order, from the bigrams up: "
    "1000000,all,500000.",
)
_BINS = flags.DEFINE_integer(
    "bins", DEFAULT_BINS, "Highest count with a Good-Turing discount."
)
_HELDOUT_SPLIT = flags.DEFINE_string(
    "heldout_split",
    None,
    "For --task, --text and --generations: split to measure perplexity on.",
)
_HELDOUT_TEXT = flags.DEFINE_string(
    "heldout_text", None, "Glob of text files to measure perplexity on."
)
_HELDOUT_TOKENS = flags.DEFINE_string(
    "heldout_tokens", None, "Glob of files of token ids to measure perplexity on."
)
_UNSEEN_LOG_PROB = flags.DEFINE_float(
    "unseen_log_prob",
    None,
    "Natural log-probability for tokens never seen, such as -1000. Default: none.",
)
_SYMBOLS = flags.DEFINE_string(
    "symbols",
    "ids",
    "What to write for tokens: ids; strings, those of the vocabulary; or the path of "
    "a symbol table.",
)


def main() -> None:
    """Builds what the flags say and prints a summary."""
    report = build(
        Settings(
            output=cli.required("output"),
            task=TASK.value,
            text=TEXT.value,
            tokens=TOKENS.value,
            generations=GENERATIONS.value,
            counts=_COUNTS.value,
            model=tuple(_MODEL.value or ()),
            weight=_WEIGHT.value,
            model_symbols=_MODEL_SYMBOLS.value,
            order=_ORDER.value,
            min_counts=cli.whole_numbers("min_counts"),
            max_ngrams=_MAX_NGRAMS.value,
            theta=_THETA.value,
            max_per_order=_limits(_MAX_PER_ORDER.value),
            bins=_BINS.value,
            memory=cli.byte_count("memory"),
            vocabulary=VOCABULARY.value,
            split=SPLIT.value,
            max_bytes=MAX_BYTES.value,
            heldout_split=_HELDOUT_SPLIT.value,
            heldout_text=_HELDOUT_TEXT.value,
            heldout_tokens=_HELDOUT_TOKENS.value,
            vocab_size=VOCAB_SIZE.value,
            end_of_text=END_OF_TEXT.value,
            unseen_log_prob=_UNSEEN_LOG_PROB.value,
            symbols=_SYMBOLS.value,
        )
    )
    print_report(report, Console())


def _limits(texts: list[str] | None) -> tuple[int | None, ...] | None:
    if not texts:
        return None
    if not all(re.fullmatch(r"\s*(\d+|all)\s*", text, re.ASCII) for text in texts):
        raise UserError(
            f"--max_per_order={','.join(texts)} must be a comma-separated list of "
            "integers, or all for no limit, such as 1000000,all,500000."
        )
    return tuple(None if text.strip() == "all" else int(text) for text in texts)


def print_report(report: BuildReport, console: Console) -> None:
    """Prints what was built as tables."""
    titles = ["order", "counted", "after min counts", "in the model"]
    columns = [report.counted, report.kept, report.pruned]
    if not report.tokens:
        titles, columns = ["order", "read", "in the model"], columns[1:]
    sizes = Table(*titles)
    for column in sizes.columns:
        column.justify = "right"
    for index in range(len(columns[0])):
        numbers = [column[index : index + 1] for column in columns]
        sizes.add_row(str(index + 1), *(f"{sum(number):,}" for number in numbers))
    sizes.add_section()
    sizes.add_row("all", *(f"{sum(numbers):,}" for numbers in columns))
    console.print(sizes)

    if report.tokens:
        console.print(f"{report.tokens:,} tokens in {report.sequences:,} sequences")
    console.print(_perplexity(report.measure), soft_wrap=True)
    stages = ", ".join(f"{name} {time:.1f}" for name, time in report.seconds.items())
    console.print(f"seconds: {stages}")
    arrays = [size for path, size in report.written.items() if path.suffix == ".npy"]
    for path, size in report.written.items():
        if path.name == storage.HEADER:
            path, size = path.parent, sum(arrays) + size
        if path.suffix != ".npy":
            console.print(f"{path}  {size:,} bytes", soft_wrap=True)


def _perplexity(measure: Measure | None) -> str:
    if measure is None:
        return (
            "perplexity: not measured; name a text with --heldout_text or "
            "--heldout_tokens"
        )
    found = measure.model
    values = f"{found.perplexity:,.2f}"
    if measure.unpruned is not None:
        before = measure.unpruned.perplexity
        values = f"{before:,.2f} before pruning, {values} after it"
    unknown = f", {found.unknown:,} of them unknown" if found.unknown else ""
    return f"perplexity, {measure.text}: {values} ({found.events:,} events{unknown})"


if __name__ == "__main__":
    cli.run(main)
