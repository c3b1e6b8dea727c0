"""Milliseconds to rescore a lattice with an n-gram model: the paper's Tables 12 and 13.

    python -m benchmarks.ngram_rescoring --ngram=MODEL --engines=viterbi,device,fst
    python -m benchmarks.ngram_rescoring --synthetic=100000000 --engines=viterbi,device

Lattices are those of `experiments.table12.latency`. Times are of `refine` as the
decode loop calls it, medians over the lattices; `device` rescores `--batch` lattices in
one call, and its time is divided by their number.
"""

import time

import jax
import numpy as np
from absl import flags

from benchmarks import records
from benchmarks.synthetic_ngrams import synthetic_model
from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import choice, each
from bpd_jax.drafting.engines.host import HostEngine
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.refiners.ngram import NGramRefiner
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.reporting.terminal import print_rows
from experiments import printed
from experiments.table12.latency import (
    DEVICE,
    ENGINES,
    Lattices,
    make_rescorer,
    refine_milliseconds,
)

NGRAM = cli.DEFINE_path("ngram", None, "n-gram model: folder or ARPA file.")
SYNTHETIC = flags.DEFINE_integer(
    "synthetic", None, "size of a synthetic 4-gram model to use instead.", 100_000
)
ENGINE_NAMES = cli.DEFINE_checked(
    "engines", ",".join(ENGINES), "engines to time.", each(choice(*ENGINES))
)
LATTICES = flags.DEFINE_integer("lattices", 100, "lattices per cell.", 1)
BATCH = flags.DEFINE_integer("batch", 32, "lattices per call of the engine device.", 1)
OUTPUT = cli.DEFINE_path("output", None, "JSON file; default: print only.")

# Steps include the certain token, as positions of a lattice do.
PAPER_PATHS = {(8, 16, paths): ms for paths, ms in printed.TABLE12.items()}
PAPER_SHAPES = {
    (steps, k, 1): ms for steps, row in printed.TABLE13.items() for k, ms in row.items()
}


def milliseconds(
    engine: str,
    rescorer: NGramRefiner | HostEngine,
    paths: int,
    lattice: Lattice,
    context: np.ndarray,
) -> float:
    """Median time per lattice."""
    batch = min(BATCH.value, len(context)) if engine == DEVICE else 1
    times = refine_milliseconds(rescorer, paths, lattice, context, batch)
    return float(np.median(times))


def measure(engine: str, model: NGramModel) -> dict[str, object]:
    """Both tables for one engine."""
    lattices = Lattices(model)
    begin = time.perf_counter()
    rescorer = make_rescorer(engine, model)
    result: dict[str, object] = {"seconds_to_build": time.perf_counter() - begin}
    if isinstance(rescorer, NGramRefiner):
        leaves = jax.tree.leaves(rescorer.arrays.params)
        result["bytes_per_ngram"] = sum(x.nbytes for x in leaves) / sum(model.sizes)
    cells = [*PAPER_PATHS, *PAPER_SHAPES]
    times = {}
    for length, width, paths in progress.bar(cells, label=engine, unit=" cells"):
        lattice, context = lattices.make(LATTICES.value, length, width)
        name = f"{length}x{width}, {paths} paths"
        times[name] = milliseconds(engine, rescorer, paths, lattice, context)
    return {**result, "milliseconds": times}


def print_tables(results: dict[str, dict]) -> None:
    """Prints the measured times and those of the paper."""
    for title, cells in (
        ("8 steps of 16 arcs (Table 12)", PAPER_PATHS),
        ("best path (Table 13)", PAPER_SHAPES),
    ):
        rows = []
        for (length, width, paths), paper in cells.items():
            name = f"{length}x{width}, {paths} paths"
            milliseconds = [f"{r['milliseconds'][name]:.3f}" for r in results.values()]
            rows.append([name, *milliseconds, f"{paper:.3f}"])
        headings = ["steps x arcs, paths", *results, "paper"]
        print_rows(headings, rows, title=f"ms, {title}")


def main() -> None:
    """Times the engines; prints and writes the results."""
    if (NGRAM.value is None) == (SYNTHETIC.value is None):
        raise UserError("give one of --ngram and --synthetic.")
    if SYNTHETIC.value is not None:
        model = synthetic_model(SYNTHETIC.value, 50_257)
        kind = "made up"
    else:
        model, kind = load_model(NGRAM.value), "from text"
    results = {engine: measure(engine, model) for engine in ENGINE_NAMES.value}
    record = {
        **records.about("ngram_rescoring"),
        "model": {"kind": kind, "ngrams": model.sizes, "total": sum(model.sizes)},
        "lattices": LATTICES.value,
        "device_batch": BATCH.value,
        "engines": results,
    }
    print_tables(results)
    if OUTPUT.value:
        records.write(OUTPUT.value, record)
        print(OUTPUT.value)


if __name__ == "__main__":
    cli.run(main)
