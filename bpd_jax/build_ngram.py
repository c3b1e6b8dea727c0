"""Builds a back-off n-gram model and writes it in three formats.

From text or tokens: counts, Katz estimate, pruning.

    python -m bpd_jax.build_ngram --text='books/**/*.txt' --output=books_4gram
    python -m bpd_jax.build_ngram --tokens=ids.txt.gz --min_counts=1,1,2,4 \\
        --max_ngrams=1000000 --output=ids_4gram
    python -m bpd_jax.build_ngram --generations=runs/smollm2/texts \\
        --heldout_split=validation --output=runs/smollm2/ngram

From counts of `bpd_jax.count_ngrams`, or from a model, to prune or convert it:

    python -m bpd_jax.build_ngram --counts=books_counts --theta=1e-8 --output=books
    python -m bpd_jax.build_ngram --model=other.arpa.gz --output=other
"""

from bpd_jax.base import cli
from bpd_jax.ngrams.build_model import BuildReport, Measure, build
from bpd_jax.ngrams.build_settings import BuildSettings
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.reporting.terminal import print_rows

cli.define_flags(BuildSettings)


def main() -> None:
    """Builds the model and prints a summary."""
    cli.required("output")
    _print(build(BuildSettings(**cli.flag_values(BuildSettings))))


def _print(report: BuildReport) -> None:
    titles = ["order", "counted", "after min counts", "in the model"]
    columns = [report.counted, report.kept, report.pruned]
    if not report.tokens:
        titles, columns = ["order", "read", "in the model"], columns[1:]
    rows: list[list[str] | None] = []
    for index in range(len(columns[0])):
        numbers = [column[index : index + 1] for column in columns]
        rows.append([str(index + 1), *(f"{sum(number):,}" for number in numbers)])
    total = ["all", *(f"{sum(numbers):,}" for numbers in columns)]
    print_rows(titles, [*rows, None, total], left=0)

    if report.tokens:
        print(f"{report.tokens:,} tokens in {report.sequences:,} sequences")
    print(_perplexity(report.measure))
    stages = ", ".join(f"{name} {time:.1f}" for name, time in report.seconds.items())
    print(f"seconds: {stages}")
    kinds = (".npy", ".safetensors")
    arrays = [size for path, size in report.written.items() if path.suffix in kinds]
    for path, size in report.written.items():
        if path.name == NGramModel.kind.marker:
            path, size = path.parent, sum(arrays) + size
        if path.suffix not in kinds:
            print(f"{path}  {size:,} bytes")


def _perplexity(measure: Measure | None) -> str:
    if measure is None:
        advice = "give a text with --heldout_text or --heldout_tokens"
        return f"perplexity: not measured; {advice}"
    model = measure.model
    values = f"{model.perplexity:,.2f}"
    if measure.unpruned is not None:
        before = measure.unpruned.perplexity
        values = f"{before:,.2f} before pruning, {values} after it"
    unknown = f", {model.unknown:,} of them unknown" if model.unknown else ""
    return f"perplexity, {measure.text}: {values} ({model.events:,} events{unknown})"


if __name__ == "__main__":
    cli.run(main)
