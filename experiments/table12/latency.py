"""Measures the search for the best drafts under an n-gram model (Tables 12 and 13).

Every lattice is new to the search, as in decoding: the model is in memory, but not in
the processor's cache. One candidate of each position continues a random walk over the
model's bigrams, the others are drawn by their frequency. Most pairs of neighbours are
therefore bigrams, which makes the search slower than for candidates of a model's heads.
"""

import functools
import operator
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import PyTree
from bpd_jax.decoding.asset_files import ASSET_FOLDERS
from bpd_jax.drafting.engines.fst import FstEngine
from bpd_jax.drafting.engines.host import HostEngine
from bpd_jax.drafting.engines.viterbi import ViterbiEngine
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.drafting.refiners.ngram import NGramRefiner
from bpd_jax.drafting.searches.best import DEVICE, FST, VITERBI, best_under_ngram
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import LatencyRecord

_RESCORERS: dict[str, Callable[[NGramModel], NGramRefiner | HostEngine]] = {
    DEVICE: NGramRefiner.from_model,
    VITERBI: ViterbiEngine,
    FST: FstEngine,
}
ENGINES = tuple(_RESCORERS)

# With fewer unigrams the candidates of a lattice might not be distinct.
_FEWEST_UNIGRAMS = 100

Key = tuple[str, int, int, int]
"""A cell of a table: engine, steps, width, paths."""

PATHS_STEPS, PATHS_WIDTH = 8, 16
"""The lattices of Table 12."""

_PATHS = (1, 2, 4, 8, 16)
_STEPS, _WIDTHS = (4, 8, 16), (2, 4, 8, 16)

SHAPES = [
    *((PATHS_STEPS, PATHS_WIDTH, paths) for paths in _PATHS),
    *((steps, k, 1) for steps in _STEPS for k in _WIDTHS),
]
"""Steps, candidates and paths of both tables; `experiments.printed` has their times."""


class Lattices:
    """Generates lattices over the tokens of an n-gram model."""

    def __init__(self, model: NGramModel, seed: int = 0) -> None:
        """Takes the model; equal seeds give equal lattices."""
        if model.sizes[0] < _FEWEST_UNIGRAMS:
            raise UserError(
                f"the n-gram model has {model.sizes[0]} unigrams, fewer than "
                f"{_FEWEST_UNIGRAMS}: too few for lattices."
            )
        self._rng = np.random.default_rng(seed)
        self._model = model
        is_token = model.keys[0] < model.vocab_size
        self._tokens = model.keys[0][is_token]
        self._cumulative = np.cumsum(np.exp(model.log_probs[0][is_token]))
        self._context = max(model.order - 2, 0)

    def make(self, number: int, length: int, width: int) -> tuple[Lattice, np.ndarray]:
        """Returns lattices `[n, L, W]` and the preceding text `[n, C]`."""
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
        # NumPy arrays, which the decode loop passes to engines on the host.
        arrays: PyTree = (columns, log_probs.astype(np.float32), entropies)
        return Lattice(*arrays), text

    def _draw(self, number: int) -> np.ndarray:
        quantiles = self._rng.random(number) * self._cumulative[-1]
        return self._tokens[np.searchsorted(self._cumulative, quantiles)]

    def _walk(self, number: int, length: int) -> np.ndarray:
        """Random walks over the bigrams; a walk without a continuation restarts."""
        model = self._model
        walk = np.empty((number, length), np.int32)
        walk[:, 0] = self._draw(number)
        if model.order == 1:
            walk[:] = self._draw(walk.size).reshape(walk.shape)
            return walk
        for position in range(1, length):
            unigram = np.searchsorted(model.keys[0], walk[:, position - 1])
            begin = np.searchsorted(model.keys[1], unigram * model.width)
            end = np.searchsorted(
                model.keys[1], unigram * model.width + trie.eos_symbol(model.vocab_size)
            )
            step = np.floor((end - begin) * self._rng.random(number)).astype(int)
            at = np.minimum(begin + step, model.keys[1].size - 1)
            after = model.keys[1][at] % model.width
            walk[:, position] = np.where(begin < end, after, self._draw(number))
        return walk


def make_rescorer(engine: str, model: NGramModel) -> NGramRefiner | HostEngine:
    """The n-gram search of one of `ENGINES`, for any number of paths."""
    return _RESCORERS[engine](model)


def refine_milliseconds(
    rescorer: NGramRefiner | HostEngine,
    paths: int,
    lattice: Lattice,
    context: np.ndarray,
    batch: int = 1,
) -> np.ndarray:
    """Times the search as the decode loop calls it, without compilation.

    Args:
      rescorer: the result of `make_rescorer`.
      paths: P, the number of drafts.
      lattice: `[n, L, W]`.
      context: the preceding text, `[n, C]`.
      batch: number of lattices in one call, at most n; a smaller last batch is not
        timed.

    Returns:
      Milliseconds per lattice of every call, `[n // batch]`.
    """
    parts = []
    for begin in range(0, len(context) - batch + 1, batch):
        part = slice(begin, begin + batch)
        rows = jax.tree.map(operator.itemgetter(part), lattice)
        parts.append((rows, context[part]))
    if isinstance(rescorer, NGramRefiner):
        arrays, parts = rescorer.arrays, jax.device_put(parts)
        compiled = jax.jit(
            functools.partial(best_under_ngram, rescorer, num_drafts=paths)
        )

        def refine(rows: Lattice, text: np.ndarray) -> object:
            return jax.block_until_ready(compiled(rows, text, arrays=arrays))

    else:
        refine = functools.partial(rescorer.refine, num_drafts=paths)
    refine(*parts[-1])  # Compiles.
    times = []
    for rows, text in parts:
        begin_time = time.perf_counter()
        refine(rows, text)
        times.append((time.perf_counter() - begin_time) * 1e3 / batch)
    return np.array(times)


def of_study(
    context: StudyContext, done: Collection[Key]
) -> Iterator[list[LatencyRecord]]:
    """Measures the n-gram model of the first contender."""
    config = context.config
    decoder, _ = context.contender(config.contenders[0], config.tasks[0])
    if decoder.ngram is None:
        raise UserError(
            f"{config.contenders[0]} has no n-gram model to measure: give one in "
            f"assets ({', '.join(ASSET_FOLDERS)})."
        )
    for record in latency_records(decoder.ngram, done=done):
        yield [record]


def latency_records(
    model: NGramModel,
    engines: Sequence[str] = ENGINES,
    *,
    runs: int = 10,
    lattices: int = 20,
    done: Collection[Key] = (),
) -> Iterator[LatencyRecord]:
    """Times every engine on lattices of every shape of Tables 12 and 13.

    Args:
      model: the n-gram model.
      engines: some of `ENGINES`; `fst` is the paper's.
      runs: number of runs of each cell, 10 in the paper.
      lattices: number of lattices of each run, all different; the time of a run is the
        median over its lattices, which excludes interruptions by other processes. The
        lattices are the same for all engines.
      done: keys that a resumed run has already measured.
    """
    missing = [
        (engine, *shape)
        for engine in engines
        for shape in dict.fromkeys(SHAPES)
        if (engine, *shape) not in done
    ]
    # One at a time: the automaton of a large model takes gigabytes.
    rescorer_of = functools.lru_cache(maxsize=1)(make_rescorer)
    for engine, steps, width, paths in progress.bar(
        missing, label="latency", unit=" cells"
    ):
        # The certain token at position 0 is not a step.
        samples = Lattices(model).make(runs * lattices, 1 + steps, width)
        times = refine_milliseconds(rescorer_of(engine, model), paths, *samples)
        times = times.reshape(runs, lattices)
        milliseconds = np.median(times, axis=1).round(6).tolist()
        yield LatencyRecord(engine, steps, width, paths, milliseconds)
