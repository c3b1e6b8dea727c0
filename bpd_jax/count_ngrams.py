"""Counts n-grams of text of any size, on one machine or with a Beam pipeline.

    python -m bpd_jax.count_ngrams --text='books/**/*.txt' --output=books_counts
    python -m bpd_jax.count_ngrams --tokens='ids-*.npy' --end_of_text=0 --order=5 \\
        --min_counts=1,1,2,4,4 --memory=16GB --output=ids_counts
    python -m bpd_jax.build_ngram --counts=ids_counts --output=ids_5gram

The same command resumes an interrupted count. A Beam pipeline is not resumed: remove
the folder OUTPUT.work of an interrupted pipeline before starting again.
"""

import time

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
from bpd_jax.ngrams.counting import beam, bounded
from bpd_jax.ngrams.counting.counts import NGramCounts
from bpd_jax.ngrams.counting.sources import TokenSource, open_source

_OUTPUT = flags.DEFINE_string("output", None, "Folder to write the counts to.")
_ORDER = flags.DEFINE_integer("order", 4, "Length N of the longest n-grams.")
_BEAM_RUNNER = flags.DEFINE_string(
    "beam_runner",
    None,
    "Count with an Apache Beam pipeline on this runner: DirectRunner, DataflowRunner, "
    "SparkRunner, FlinkRunner. Default: on this machine, without Beam. A killed Beam "
    "count is not resumed: remove OUTPUT.work and begin anew.",
)
_BEAM_OPTIONS = flags.DEFINE_string(
    "beam_options",
    "",
    "Options of the pipeline, with blanks between: '--direct_num_workers=2 "
    "--direct_running_mode=multi_processing'.",
)
_BEAM_FOLDER = flags.DEFINE_string(
    "beam_folder",
    None,
    "Folder that Beam's workers write and this machine reads, such as gs://bucket/x. "
    "Default: OUTPUT.work, for workers on this machine.",
)


def main() -> None:
    """Counts what the flags say and prints a summary."""
    output = cli.required("output")
    begin = time.perf_counter()
    source = _source()
    min_counts = cli.whole_numbers("min_counts")
    if min_counts is not None and len(min_counts) != _ORDER.value:
        raise UserError(
            f"--min_counts has {len(min_counts)} numbers, but --order is "
            f"{_ORDER.value}: give one number per order, such as 1,1,2,4."
        )
    memory = cli.byte_count("memory")
    if _BEAM_RUNNER.value:
        counts = beam.count_with_beam(
            source,
            output,
            order=_ORDER.value,
            min_counts=min_counts,
            memory=memory,
            options=[f"--runner={_BEAM_RUNNER.value}", *_BEAM_OPTIONS.value.split()],
            shared_folder=_BEAM_FOLDER.value,
        )
    else:
        if _BEAM_OPTIONS.value or _BEAM_FOLDER.value:
            raise UserError("--beam_options and --beam_folder go with --beam_runner.")
        counts = bounded.count_to_folder(
            source,
            output,
            order=_ORDER.value,
            min_counts=min_counts,
            memory=memory,
        )
    print_summary(counts, Console())
    print(f"{output}: {time.perf_counter() - begin:.1f} seconds")


def _source() -> TokenSource:
    sources = (TASK, TEXT, TOKENS, GENERATIONS)
    given = [flag.name for flag in sources if flag.value]
    if len(given) != 1:
        found = " and ".join(f"--{name}" for name in given) or "none"
        raise UserError(
            "give exactly one of --task, --text, --tokens and --generations: found "
            f"{found}."
        )
    of_text, of_tokens = (SPLIT, MAX_BYTES), (VOCAB_SIZE, END_OF_TEXT)
    foreign = {"tokens": of_text, "generations": (MAX_BYTES, *of_tokens)}
    for flag in foreign.get(given[0], of_tokens):
        if flag.value is not None:
            raise UserError(f"--{flag.name} does not go with --{given[0]}.")
    return open_source(
        task=TASK.value,
        text=TEXT.value,
        tokens=TOKENS.value,
        generations=GENERATIONS.value,
        split=SPLIT.value,
        vocabulary=VOCABULARY.value,
        max_bytes=MAX_BYTES.value,
        vocab_size=VOCAB_SIZE.value,
        end_of_text=END_OF_TEXT.value,
    )


def print_summary(counts: NGramCounts, console: Console) -> None:
    """Prints the sizes of what was counted as a table."""
    sizes = Table("order", "in the text", "after min counts")
    for column in sizes.columns:
        column.justify = "right"
    for index, seen in enumerate(counts.seen):
        kept = counts.sizes[index] if index < len(counts.sizes) else 0
        sizes.add_row(str(index + 1), f"{seen:,}", f"{kept:,}")
    sizes.add_section()
    sizes.add_row("all", f"{sum(counts.seen):,}", f"{sum(counts.sizes):,}")
    console.print(sizes)
    console.print(f"{counts.tokens:,} tokens in {counts.sequences:,} sequences")


if __name__ == "__main__":
    cli.run(main)
