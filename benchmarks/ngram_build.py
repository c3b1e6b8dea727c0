"""Time and memory of building an n-gram model: count, Katz, prune; its ARPA file.

    python -m benchmarks.ngram_build --text='corpus/train-*.jsonl.gz'
    python -m benchmarks.ngram_build --tokens=ids.npy --end_of_text=50256 \\
        --max_tokens=2370000 --output=benchmarks/results/ngram_build_small_cpu.json

Writes one JSON file to benchmarks/results/ with device, date and versions. Reading and
tokenizing are timed separately. Compilation is not timed. Every stage is repeated
`--rounds` times; the median is reported.
For scale: on 2.37 million tokens and 2 cores, OpenGrm NGram 1.3.6 took 5.7 s to count,
9.5 s to estimate and 14.9 s to prune, and KenLM's lmplz 2.8 s from text to ARPA file.
"""

import contextlib
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from absl import flags

from benchmarks import records
from bpd_jax.base import cli
from bpd_jax.ngrams.counting import bounded_memory
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.counting.sources import TokenSource, open_source
from bpd_jax.ngrams.counting.windows import TokenBatch
from bpd_jax.ngrams.formats.arpa import write_arpa
from bpd_jax.ngrams.formats.arpa_reader import read_arpa
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.prune import prune

TEXT = cli.DEFINE_path("text", None, "glob of text files.")
TOKENS = cli.DEFINE_path("tokens", None, "glob of files of token IDs.")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", None, "for --tokens.")
END_OF_TEXT = flags.DEFINE_integer("end_of_text", None, "for --tokens.")
ORDER = flags.DEFINE_integer("order", 4, "order of the model.")
MAX_NGRAMS = flags.DEFINE_integer("max_ngrams", 5_000_000, "size of the pruned model.")
MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "approximate maximum; default: all."
)
MEMORY = flags.DEFINE_integer(
    "memory", bounded_memory.DEFAULT_MEMORY, "bytes for counting."
)
ROUNDS = flags.DEFINE_integer("rounds", 3, "repetitions of every stage.")
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/ngram_build_cpu.json", "file.")


class Loaded(TokenSource):
    """The first sequences of a source, in memory."""

    def __init__(self, source: TokenSource, max_tokens: int | None) -> None:
        super().__init__(source.name, source.vocab_size, source.end_of_text)
        self._batches: list[TokenBatch] = []
        self.tokens = 0
        for batch in source.batches():
            room = sys.maxsize if max_tokens is None else max_tokens - self.tokens
            fitting = np.searchsorted(np.cumsum(batch.lengths), room, "right")
            lengths = batch.lengths[:fitting]
            size = int(lengths.sum())
            self._batches.append(TokenBatch(batch.tokens[:size], lengths))
            self.tokens += size
            if fitting < batch.lengths.size:
                break

    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        assert skip == 0, "nothing is resumed here"
        yield from self._batches

    def fingerprint(self) -> str:
        return self.name


class Stopwatch:
    """Seconds of each stage, and the peak memory up to its end."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
        self.peaks.setdefault(name, peak)


def warm_up(order: int) -> None:
    """Compiles all just-in-time compiled functions."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 9, 30) for _ in range(50)]
    model = estimate_katz(count_ngrams(sequences, order=order))
    prune(model, model.sizes[0] + 20)


def main() -> None:
    """Times the stages; prints and writes the results."""
    source = open_source(
        text=TEXT.value,
        tokens=TOKENS.value,
        vocab_size=VOCAB_SIZE.value,
        end_of_text=END_OF_TEXT.value,
    )
    warm_up(ORDER.value)
    watch = Stopwatch()
    with watch.stage("read"):
        loaded = Loaded(source, MAX_TOKENS.value)
    for _ in range(ROUNDS.value):
        with tempfile.TemporaryDirectory() as work:
            with watch.stage("count"):
                counts = bounded_memory.count(
                    loaded,
                    work,
                    order=ORDER.value,
                    memory=MEMORY.value,
                )
            seen, counted = counts.seen, counts.sizes
            with watch.stage("estimate"):
                model = estimate_katz(counts)
            del counts
            with watch.stage("prune"):
                model = prune(model, MAX_NGRAMS.value)
            sizes, vocab_size = model.sizes, model.vocab_size
            with watch.stage("write_arpa"):
                write_arpa(model, f"{work}/model.arpa")
            del model
            with watch.stage("read_arpa"):
                read_arpa(f"{work}/model.arpa", vocab_size=vocab_size)
    medians = {stage: statistics.median(all_) for stage, all_ in watch.seconds.items()}
    build_seconds = sum(medians[stage] for stage in ("count", "estimate", "prune"))
    result = {
        **records.about("ngram_build"),
        "tokens": loaded.tokens,
        "order": ORDER.value,
        "ngrams_in_text": seen,
        "ngrams_counted": counted,
        "ngrams_in_model": sizes,
        "rounds": ROUNDS.value,
        "seconds": medians,
        "fastest_seconds": {stage: min(all_) for stage, all_ in watch.seconds.items()},
        "count_estimate_prune_seconds": build_seconds,
        "tokens_per_second": loaded.tokens / build_seconds,
        "arpa_ngrams_per_second": {
            stage: sum(sizes) / medians[stage] for stage in ("write_arpa", "read_arpa")
        },
        "peak_megabytes_by_end_of_stage": watch.peaks,
    }
    records.write(OUTPUT.value, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    cli.run(main)
