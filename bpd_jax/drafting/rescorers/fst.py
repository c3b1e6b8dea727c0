"""n-gram refinement by OpenFst: lattice ∘ n-gram automaton, then shortest paths.

The paper's engine (section 7.2). Backoff is an epsilon arc that any path may take, so
scores are upper bounds of the exact ones (see `bpd_jax.ngrams.fst`). Verification
makes the output exact whatever is drafted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bpd_jax.drafting.lattice import Drafts, Lattice
from bpd_jax.errors import UserError
from bpd_jax.ngrams.fst import build_fst
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.states import StateTable
from bpd_jax.typing import AnyArray, Int


class FstRescorer:
    """The P best distinct drafts under Σ log p_head + α · log p_ngram, on the host.

    The certain first token is part of the n-gram's context and is not scored.
    """

    on_device = False

    def __init__(self, model: NGramModel, num_drafts: int, alpha: float = 1.0) -> None:
        """Builds the automaton once.

        Args:
          model: a back-off n-gram model over the same token ids. Tokens that it has
            no unigram for get one of log-probability -1000, so that every path of a
            lattice has a score.
          num_drafts: P, the paper's p.
          alpha: weight of the n-gram's log-probability, above 0.
        """
        if alpha <= 0:
            raise UserError(f"alpha is {alpha}: it must be above 0 (0-gram is α = 0).")
        self.num_drafts = num_drafts
        self.alpha = alpha
        self.context_length = max(model.order - 1, 1)
        model = model.with_unseen_tokens()
        self._states = StateTable(model)
        self._ngram = build_fst(model, continuous=True)

    def refine(self, lattice: Lattice, context: Int[AnyArray, "B C"]) -> Drafts:
        """Returns numpy arrays `[B, P, L]` int32 and `[B, P]` float32."""
        columns = np.asarray(lattice.tokens)
        log_probs = np.asarray(lattice.log_probs)
        batch, length, _ = columns.shape
        tokens = np.zeros((batch, self.num_drafts, length), np.int32)
        scores = np.full((batch, self.num_drafts), -np.inf, np.float32)
        for row, history in enumerate(np.asarray(context)):
            certain = columns[row, 0, 0]
            text = [int(token) for token in history if token >= 0]
            paths = self._best_paths(
                columns[row, 1:], log_probs[row, 1:], [*text, int(certain)]
            )
            tokens[row, :, 0] = certain
            for rank, (score, path) in enumerate(paths):
                tokens[row, rank, 1:] = path
                scores[row, rank] = score
        return Drafts(tokens, scores)

    def _best_paths(
        self, tokens: np.ndarray, log_probs: np.ndarray, history: Sequence[int]
    ) -> list[tuple[float, Any]]:
        """The best paths of one lattice `[L-1, W]` after `history`, best first."""
        import pynini

        # Costs are divided by α here, and scores multiplied by it below: the
        # automaton of the n-gram model is then the same for every α.
        costs = -log_probs / self.alpha
        acceptor = pynini.Fst()
        acceptor.add_states(len(tokens) + 1)
        acceptor.set_start(0).set_final(len(tokens))
        for state, column in enumerate(zip(tokens.tolist(), costs, strict=True)):
            for token, cost in zip(*column, strict=True):
                arc = pynini.Arc(token + 1, token + 1, cost, state + 1)
                acceptor.add_arc(state, arc)
        self._ngram.set_start(self._states.of_history(history))
        paths = pynini.compose(acceptor, self._ngram)
        # Only the end of the lattice is final. A back-off there predicts nothing, but
        # a back-off weight above 1 would make it pay.
        zero = pynini.Weight.zero(paths.weight_type())
        for state in paths.states():
            if paths.final(state) != zero:
                paths.delete_arcs(state)
        # One string has as many paths as ways to back off. Its best path comes first,
        # so the first P distinct strings of enough best paths are the P best strings;
        # OpenFst's own `unique` determinises everything first, which is far slower.
        wanted = self.num_drafts
        count = wanted if wanted == 1 else 4 * wanted
        while True:
            best = pynini.shortestpath(paths, nshortest=count)
            strings = _strings(best)
            scores: dict[tuple[int, ...], float] = {}
            for labels, weight in strings:
                scores.setdefault(tuple(label - 1 for label in labels), weight)
            if len(scores) >= wanted or len(strings) < count:
                break
            count *= 4
        return [(-self.alpha * cost, path) for path, cost in scores.items()][:wanted]


def _strings(fst: Any) -> list[tuple[list[int], float]]:
    """Labels and weight of every path of an acyclic acceptor, cheapest first."""
    iterator = fst.paths()
    found = []
    while not iterator.done():
        labels = [label for label in iterator.ilabels() if label]
        found.append((labels, float(iterator.weight())))
        iterator.next()
    return sorted(found, key=lambda pair: (pair[1], pair[0]))
