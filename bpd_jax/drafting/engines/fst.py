"""N-gram refinement with OpenFst: lattice ∘ n-gram automaton, then shortest paths.

This is the paper's engine (section 7.2). Back-off is an epsilon arc, which any path may
take, so that scores are upper bounds of the exact ones (see
`bpd_jax.ngrams.formats.openfst`). Decoding remains lossless due to verification.
"""

import itertools
import threading
from typing import TYPE_CHECKING, Self

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.drafting.engines.host import HostEngine
from bpd_jax.ngrams.formats.openfst import (
    Automaton,
    StateTable,
    automaton_of,
    encode,
)
from bpd_jax.ngrams.model import NGramModel

if TYPE_CHECKING:
    import pynini


class FstEngine(HostEngine):
    """N-gram search with OpenFst."""

    def __init__(self, model: NGramModel, alpha: float = 1.0) -> None:
        """Builds the automaton of a model over the same token ids; alpha is above 0."""
        super().__init__(model.order, alpha)
        _check_above_zero(alpha)
        try:
            import pynini
        except ImportError as error:
            raise UserError(
                "the engine fst needs the package pynini: pip install pynini, or use "
                "the engine device."
            ) from error
        model = model.with_finite_scores()
        self._states = StateTable(model)
        automaton = automaton_of(model, continuous=True)
        self._ngram = pynini.Fst.read_from_string(encode(automaton))
        # The start of the automaton is set for each composition.
        self._composing = threading.Lock()

    def with_weight(self, alpha: float, alpha_slope: float = 0.0) -> Self:
        """Returns an engine with another weight that shares the automaton."""
        _check_above_zero(alpha)
        if alpha_slope:
            raise UserError(
                "the engine fst needs a constant weight: leave out slope, or use the "
                "engine device or viterbi."
            )
        return super().with_weight(alpha)

    def _best_paths(
        self,
        tokens: np.ndarray,
        log_probs: np.ndarray,
        history: np.ndarray,
        alphas: np.ndarray,
        num_drafts: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        # An arc is used at all positions, so that the weight is constant.
        # Costs are divided by α and scores multiplied by it, so that the automaton is
        # the same for every α.
        state = self._states.of_history(history.tolist())
        composed = self._compose(tokens, -log_probs / self.alpha, state)
        paths = best_paths(composed, num_drafts)
        drafts = np.array(list(paths), np.int32).reshape(len(paths), len(tokens))
        return drafts, self.alpha * np.array(list(paths.values()))

    def _compose(
        self, tokens: np.ndarray, costs: np.ndarray, state: int
    ) -> "pynini.Fst":
        import pynini

        lattice = pynini.Fst.read_from_string(encode(_sausage(tokens, costs)))
        with self._composing:
            self._ngram.set_start(state)
            paths = pynini.compose(lattice, self._ngram)
        # Only the end of the lattice is final. Backing off there is useless, but a
        # back-off weight above 1 would improve the score.
        zero = pynini.Weight.zero(paths.weight_type())
        for node in paths.states():
            if paths.final(node) != zero:
                paths.delete_arcs(node)
        return paths


def _check_above_zero(alpha: float) -> None:
    if alpha == 0:
        raise UserError(f"alpha is {alpha}: it must be above 0 (0-gram is α = 0).")


def best_paths(paths: "pynini.Fst", count: int) -> dict[tuple[int, ...], float]:
    """The `count` best distinct strings of an acyclic acceptor, or all if fewer.

    Their tokens and scores, best first. A string may have many paths, which differ in
    where they back off. Its best path comes first, so the first distinct strings of
    enough best paths are the best strings. OpenFst's option `unique` determinizes the
    acceptor first, which is far slower.
    """
    import pynini

    num_paths = count if count == 1 else 2 * count
    while True:
        strings: list[tuple[float, tuple[int, ...]]] = []
        iterator = pynini.shortestpath(paths, nshortest=num_paths).paths()
        while not iterator.done():
            tokens = tuple(label - 1 for label in iterator.ilabels() if label)
            strings.append((float(iterator.weight()), tokens))
            iterator.next()
        best: dict[tuple[int, ...], float] = {}
        for cost, tokens in sorted(strings):
            best.setdefault(tokens, -cost)
        if len(best) >= count or len(strings) < num_paths:
            return dict(itertools.islice(best.items(), count))
        num_paths *= 4


def _sausage(tokens: np.ndarray, costs: np.ndarray) -> Automaton:
    """The acceptor of all paths of a lattice `[J, W]`: one state per position."""
    labels, weights = [], []
    for column, column_costs in zip(tokens, costs, strict=True):
        # Sorted by label; a repeated token has its lowest cost.
        by_cost = np.argsort(column_costs, kind="stable")
        label, first = np.unique(column[by_cost] + 1, return_index=True)
        cost = column_costs[by_cost][first]
        labels.append(label[np.isfinite(cost)])
        weights.append(cost[np.isfinite(cost)])
    counts = np.array([label.size for label in labels] + [0])
    finals = np.full(counts.size, np.inf, np.float32)
    finals[-1] = 0
    return Automaton(
        start=0,
        finals=finals,
        arc_counts=counts,
        labels=np.concatenate(labels).astype(np.int32),
        weights=np.concatenate(weights).astype(np.float32),
        targets=np.repeat(np.arange(1, counts.size), counts[:-1]).astype(np.int32),
    )
