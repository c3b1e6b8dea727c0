"""Builds a Katz back-off n-gram model: counts, estimate, pruning, ARPA and automaton.

    python -m bpd_jax.build_ngram --text='books/**/*.txt' --output=books_4gram
    python -m bpd_jax.build_ngram --tokens=ids.txt.gz --order=4 --min_counts=1,1,2,4 \\
        --max_ngrams=1000000 --output=ids_4gram
"""

from absl import flags
from rich.console import Console
from rich.table import Table

from bpd_jax import cli
from bpd_jax.errors import UserError
from bpd_jax.ngrams.build import Report, Settings, build
from bpd_jax.ngrams.katz import DEFAULT_BINS

_TASK = flags.DEFINE_string("task", None, "Text task to read, such as stdlib.")
_TEXT = flags.DEFINE_string("text", None, "Glob of .txt, .jsonl or .jsonl.gz files.")
_TOKENS = flags.DEFINE_string(
    "tokens", None, "File of token ids, one sequence per line, plain or gzip."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write the model to.")
_ORDER = flags.DEFINE_integer("order", 4, "Length N of the longest n-grams.")
_MIN_COUNTS = flags.DEFINE_list(
    "min_counts", None, "Least count of an n-gram, per order: 1,1,2,4. Default: all 1."
)
_MAX_NGRAMS = flags.DEFINE_integer(
    "max_ngrams", None, "Prune to at most this many n-grams of all orders."
)
_BINS = flags.DEFINE_integer(
    "bins", DEFAULT_BINS, "Highest count with a Good-Turing discount."
)
_VOCABULARY = flags.DEFINE_string(
    "vocabulary",
    "gpt3",
    "For --task and --text: gpt3, bpe:N, a tokenizer.json or a folder that has one.",
)
_SPLIT = flags.DEFINE_string(
    "split",
    None,
    "For --task and --text: train, validation or all. Default: train for --task, "
    "all for --text.",
)
_MAX_BYTES = flags.DEFINE_integer(
    "max_bytes", None, "For --task and --text: bytes of text to take. Default: all."
)
_HELDOUT_SPLIT = flags.DEFINE_string(
    "heldout_split", None, "For --task and --text: split to measure perplexity on too."
)
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", None, "For --tokens: vocabulary size. Default: highest id plus 1."
)
_END_OF_TEXT = flags.DEFINE_integer(
    "end_of_text", None, "For --tokens: token that stands for the ends of a sequence."
)
_UNSEEN_LOG_PROB = flags.DEFINE_float(
    "unseen_log_prob",
    None,
    "Natural log-probability for tokens never seen, such as -1000. Default: none.",
)


def main() -> None:
    """Builds what the flags say and prints a summary."""
    report = build(
        Settings(
            output=cli.required("output"),
            task=_TASK.value,
            text=_TEXT.value,
            tokens=_TOKENS.value,
            order=_ORDER.value,
            min_counts=_whole_numbers(_MIN_COUNTS.value),
            max_ngrams=_MAX_NGRAMS.value,
            bins=_BINS.value,
            vocabulary=_VOCABULARY.value,
            split=_SPLIT.value,
            max_bytes=_MAX_BYTES.value,
            heldout_split=_HELDOUT_SPLIT.value,
            vocab_size=_VOCAB_SIZE.value,
            end_of_text=_END_OF_TEXT.value,
            unseen_log_prob=_UNSEEN_LOG_PROB.value,
        )
    )
    print_report(report, Console())


def _whole_numbers(texts: list[str] | None) -> tuple[int, ...] | None:
    if not texts:
        return None
    if not all(text.strip().isdecimal() for text in texts):
        raise UserError(
            f"--min_counts={','.join(texts)} is no list of numbers such as 1,1,2,4."
        )
    return tuple(int(text) for text in texts)


def print_report(report: Report, console: Console) -> None:
    """Prints what was built as tables."""
    sizes = Table("order", "counted", "after min counts", "in the model")
    for column in sizes.columns:
        column.justify = "right"
    for index, counted in enumerate(report.counted):
        rows = (report.kept, report.pruned)
        rest = [row[index] if index < len(row) else 0 for row in rows]
        sizes.add_row(str(index + 1), *(f"{size:,}" for size in (counted, *rest)))
    totals = (sum(row) for row in (report.counted, report.kept, report.pruned))
    sizes.add_section()
    sizes.add_row("all", *(f"{total:,}" for total in totals))
    console.print(sizes)

    console.print(f"{report.tokens:,} tokens in {report.sequences:,} sequences")
    for name, result in (("training text", report.train), ("held out", report.heldout)):
        if result is not None:
            unknown = f" ({result.unknown:,} unknown)" if result.unknown else ""
            console.print(
                f"perplexity, {name}: {result.perplexity:,.2f} over "
                f"{result.events:,} events{unknown}"
            )
    stages = ", ".join(f"{name} {time:.1f}" for name, time in report.seconds.items())
    console.print(f"seconds: {stages}")
    for path, size in report.written.items():
        console.print(f"{path}  {size:,} bytes", soft_wrap=True)


if __name__ == "__main__":
    cli.run(main)
