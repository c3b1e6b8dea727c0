"""Counts n-grams of text of any size, on one machine or with a Beam pipeline.

    python -m bpd_jax.count_ngrams --text='books/**/*.txt' --output=books_counts
    python -m bpd_jax.count_ngrams --tokens='ids-*.npy' --end_of_text=0 --order=5 \\
        --min_counts=1,1,2,4,4 --memory=16GB --output=ids_counts
    python -m bpd_jax.build_ngram --counts=ids_counts --output=ids_5gram

The same command resumes an interrupted count. A Beam pipeline is not resumed: remove
the folder OUTPUT.work of an interrupted pipeline before starting again.
"""

import itertools
import time
from typing import Any

from absl import flags

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.build_settings import DEFAULT_ORDER, CountSettings
from bpd_jax.ngrams.counting import bounded_memory
from bpd_jax.ngrams.counting.count_pipeline import count_with_beam
from bpd_jax.ngrams.counting.sources import source_of
from bpd_jax.reporting.terminal import print_rows

cli.define_flags(CountSettings)
_BEAM_RUNNER = flags.DEFINE_string(
    "beam_runner",
    None,
    "Count with an Apache Beam pipeline on this runner: DirectRunner, "
    "DataflowRunner, SparkRunner, FlinkRunner; see docs/clusters.md. Default: on this "
    "machine, without Beam. A killed Beam count is not resumed: remove OUTPUT.work and "
    "start again.",
)
_BEAM_OPTIONS = flags.DEFINE_string(
    "beam_options",
    "",
    "Options of the pipeline, separated by spaces: '--direct_num_workers=2 "
    "--direct_running_mode=multi_processing'.",
)
_BEAM_FOLDER = cli.DEFINE_path(
    "beam_folder",
    None,
    "Folder for the results of Beam's workers, such as gs://bucket/x. "
    "Default: OUTPUT.work, for workers on this machine.",
)


def main() -> None:
    """Counts n-grams and prints a summary."""
    output = cli.required("output")
    begin = time.perf_counter()
    settings = CountSettings(**cli.flag_values(CountSettings))
    source = source_of(settings)
    sizes: dict[str, Any] = {
        "order": settings.order or DEFAULT_ORDER,
        "min_counts": settings.min_counts,
        "memory": settings.memory,
    }
    if _BEAM_RUNNER.value:
        counts = count_with_beam(
            source,
            output,
            **sizes,
            options=[f"--runner={_BEAM_RUNNER.value}", *_BEAM_OPTIONS.value.split()],
            shared_folder=_BEAM_FOLDER.value,
        )
    else:
        if _BEAM_OPTIONS.value or _BEAM_FOLDER.value:
            raise UserError("--beam_options and --beam_folder require --beam_runner.")
        counts = bounded_memory.count_to_folder(source, output, **sizes)
    numbers = itertools.zip_longest(counts.seen, counts.sizes, fillvalue=0)
    rows = [
        [str(order), f"{counted:,}", f"{retained:,}"]
        for order, (counted, retained) in enumerate(numbers, start=1)
    ]
    total = ["all", f"{sum(counts.seen):,}", f"{sum(counts.sizes):,}"]
    headings = ["order", "in the text", "after min counts"]
    print_rows(headings, [*rows, None, total], left=0)
    print(f"{counts.tokens:,} tokens in {counts.sequences:,} sequences")
    print(f"{output}: {time.perf_counter() - begin:.1f} seconds")


if __name__ == "__main__":
    cli.run(main)
