"""Milliseconds to rescore a lattice with an n-gram model: the paper's Tables 12 and 13.

    python -m benchmarks.ngram_rescoring --ngram=MODEL --engines=viterbi,device,fst
    python -m benchmarks.ngram_rescoring --synthetic=100000000 --engines=viterbi,device

Every lattice is new to the search, as in decoding: it finds the model in memory but not
in the processor's cache. One candidate of each position continues a walk over the
model's bigrams, the others are drawn by their frequency, so that most pairs of
neighbours are bigrams: harder than what a language model's heads propose. Times are of
`refine` as the decode loop calls it, medians over the lattices; `device` rescores
`--batch` lattices in one call, and its time is divided by their number.
"""

import json
import operator
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks.synthetic_ngrams import synthetic_model
from bpd_jax import cli, files, progress
from bpd_jax.drafting.interface import Rescorer
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.rescorers.device import DeviceRescorer
from bpd_jax.drafting.rescorers.fst import FstRescorer
from bpd_jax.drafting.rescorers.viterbi import ViterbiRescorer
from bpd_jax.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.formats.load import load_model
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.reporting import build

NGRAM = flags.DEFINE_string("ngram", None, "n-gram model: folder, ARPA file or .fst.")
SYNTHETIC = flags.DEFINE_integer(
    "synthetic", None, "instead: make up a 4-gram model of this many n-grams."
)
ENGINES = ("device", "viterbi", "fst", "fst_exact")
ENGINE_NAMES = flags.DEFINE_list("engines", list(ENGINES), "engines to time.")
LATTICES = flags.DEFINE_integer("lattices", 100, "lattices per cell.")
BATCH = flags.DEFINE_integer("batch", 32, "lattices in one call of the engine device.")
OUTPUT = flags.DEFINE_string("output", None, "JSON file; default: printed only.")

# Table 12: 8 steps of 16 arcs, by the number of paths. Table 13: the best path, by
# steps and arcs. Milliseconds as printed in the paper, with OpenFst and about 100
# million n-grams. The first step is the certain token.
PAPER_PATHS = {1: 1.630, 2: 1.751, 4: 1.878, 8: 1.871, 16: 1.983}
PAPER_SHAPES = {
    (4, 2): 1.038,
    (4, 4): 1.050,
    (4, 8): 1.130,
    (4, 16): 1.237,
    (8, 2): 1.061,
    (8, 4): 1.144,
    (8, 8): 1.234,
    (8, 16): 1.630,
    (16, 2): 1.102,
    (16, 4): 1.206,
    (16, 8): 1.558,
    (16, 16): 2.174,
}


class Lattices:
    """Makes lattices over the tokens of a model."""

    def __init__(self, model: NGramModel, seed: int = 0) -> None:
        """Takes the model; equal seeds make equal lattices."""
        self._rng = np.random.default_rng(seed)
        self._model = model
        is_token = model.keys[0] < model.vocab_size
        self._tokens = model.keys[0][is_token]
        self._chances = np.cumsum(np.exp(model.log_probs[0][is_token]))
        self._context = max(model.order - 2, 0)

    def make(self, number: int, length: int, width: int) -> tuple[Lattice, np.ndarray]:
        """Returns lattices `[n, L, W]` and the text before them `[n, C]`."""
        walk = self._walk(number, self._context + length)
        text, tokens = walk[:, : self._context], walk[:, self._context :]
        columns = np.empty((number, length, width), np.int32)
        for row in range(number):
            for position in range(length):
                others = np.unique(self._draw(8 * width))
                others = others[others != tokens[row, position]]
                others = self._rng.permutation(others)[: width - 1]
                column = np.append(others, tokens[row, position])
                columns[row, position] = self._rng.permutation(column)
        columns[:, 0] = tokens[:, :1]
        log_probs = -np.sort(self._rng.exponential(2.0, columns.shape)) - 0.5
        log_probs[:, 0] = [0] + [-np.inf] * (width - 1)
        entropies = np.zeros(columns.shape[:2], np.float32)
        return Lattice(columns, log_probs.astype(np.float32), entropies), text

    def _draw(self, number: int) -> np.ndarray:
        place = self._rng.random(number) * self._chances[-1]
        return self._tokens[np.searchsorted(self._chances, place)]

    def _walk(self, number: int, length: int) -> np.ndarray:
        """Random walks over the bigrams; one without a continuation begins anew."""
        model = self._model
        walk = np.empty((number, length), np.int32)
        walk[:, 0] = self._draw(number)
        if model.order == 1:
            walk[:] = self._draw(walk.size).reshape(walk.shape)
            return walk
        for place in range(1, length):
            unigram = np.searchsorted(model.keys[0], walk[:, place - 1])
            begin = np.searchsorted(model.keys[1], unigram * model.width)
            end = np.searchsorted(
                model.keys[1], unigram * model.width + trie.eos_symbol(model.vocab_size)
            )
            step = np.floor((end - begin) * self._rng.random(number)).astype(int)
            at = np.minimum(begin + step, model.keys[1].size - 1)
            after = model.keys[1][at] % model.width
            walk[:, place] = np.where(begin < end, after, self._draw(number))
        return walk


def milliseconds(
    engine: str, rescorer: Rescorer, lattice: Lattice, context: np.ndarray
) -> float:
    """Median time per lattice."""
    number = len(context)
    batch = min(BATCH.value, number) if engine == "device" else 1
    refine: Callable = rescorer.refine
    if engine == "device":
        compiled = jax.jit(rescorer.refine)

        def refine(*arguments: object) -> object:
            return jax.block_until_ready(compiled(*arguments))

    parts = []
    for begin in range(0, number - batch + 1, batch):
        part = slice(begin, begin + batch)
        rows = jax.tree.map(operator.itemgetter(part), lattice)
        parts.append((rows, context[part]))
        if engine == "device":
            parts[-1] = jax.device_put(parts[-1])
    times = []
    # The first one compiles.
    for place, (rows, text) in enumerate([parts[-1], *parts]):
        begin_time = time.perf_counter()
        refine(rows, text, rescorer.arrays)
        if place:
            times.append((time.perf_counter() - begin_time) * 1e3 / batch)
    return statistics.median(times)


def make_rescorer(
    engine: str, model: NGramModel
) -> DeviceRescorer | ViterbiRescorer | FstRescorer:
    """The rescorer of an engine; others of more paths share what it is made of."""
    if engine == "device":
        return DeviceRescorer.from_model(model, 1)
    if engine == "viterbi":
        return ViterbiRescorer(model, 1)
    return FstRescorer(model, 1, exact=engine == "fst_exact")


def measure(engine: str, model: NGramModel) -> dict[str, object]:
    """Both tables for one engine."""
    begin = time.perf_counter()
    rescorer = make_rescorer(engine, model)
    result: dict[str, object] = {"seconds_to_build": time.perf_counter() - begin}
    if isinstance(rescorer, DeviceRescorer):
        table = rescorer.arrays.table
        result["bytes_per_ngram"] = table.nbytes / sum(model.sizes)
    lattices = Lattices(model)
    cells = [(8, 16, paths) for paths in PAPER_PATHS]
    cells += [(*shape, 1) for shape in PAPER_SHAPES]
    times = {}
    for length, width, paths in progress.bar(cells, label=engine, unit=" cells"):
        lattice, context = lattices.make(LATTICES.value, length, width)
        name = f"{length}x{width}, {paths} paths"
        times[name] = milliseconds(
            engine, rescorer.with_drafts(paths), lattice, context
        )
    return {**result, "milliseconds": times}


def print_tables(results: dict[str, dict], console: Console) -> None:
    """Prints what was measured beside what the paper prints."""
    for title, cells in (
        (
            "8 steps of 16 arcs (Table 12)",
            {(8, 16, n): ms for n, ms in PAPER_PATHS.items()},
        ),
        ("best path (Table 13)", {(*s, 1): ms for s, ms in PAPER_SHAPES.items()}),
    ):
        table = Table("steps x arcs, paths", *results, "paper", title=f"ms, {title}")
        for column in table.columns[1:]:
            column.justify = "right"
        for (length, width, paths), printed in cells.items():
            name = f"{length}x{width}, {paths} paths"
            found = [f"{r['milliseconds'][name]:.3f}" for r in results.values()]
            table.add_row(name, *found, f"{printed:.3f}")
        console.print(table)


def main() -> None:
    """Measures, prints, writes."""
    if (NGRAM.value is None) == (SYNTHETIC.value is None):
        raise UserError("give one of --ngram and --synthetic.")
    for engine in ENGINE_NAMES.value:
        if engine not in ENGINES:
            raise UserError(
                f"unknown n-gram engine {engine!r}: choose from {', '.join(ENGINES)}."
            )
    for flag, least in ((SYNTHETIC, 100_000), (LATTICES, 1), (BATCH, 1)):
        if flag.value is not None and flag.value < least:
            raise UserError(f"--{flag.name} is {flag.value}: give {least} or more.")
    if SYNTHETIC.value is not None:
        model = synthetic_model(SYNTHETIC.value, 50_257)
        kind = "made up"
    else:
        model, kind = load_model(NGRAM.value), "from text"
    if model.sizes[0] < 100:
        raise UserError("the model has fewer than 100 unigrams: too few for lattices.")
    results = {engine: measure(engine, model) for engine in ENGINE_NAMES.value}
    record = {
        "command": " ".join(["python -m benchmarks.ngram_rescoring", *sys.argv[1:]]),
        "date": build.today(),
        "device": build.device(),
        "versions": build.versions(),
        "model": {"kind": kind, "ngrams": model.sizes, "total": sum(model.sizes)},
        "lattices": LATTICES.value,
        "device_batch": BATCH.value,
        "engines": results,
    }
    print_tables(results, Console())
    if OUTPUT.value:
        with files.replacing_file(pathlib.Path(OUTPUT.value)) as temporary:
            text = json.dumps(record, indent=2) + "\n"
            temporary.write_text(text, encoding="utf-8")
        print(OUTPUT.value)


if __name__ == "__main__":
    cli.run(main)
