"""n-gram refinement on the host, exact: dynamic programming over the histories."""

import copy

import numpy as np

from bpd_jax.drafting.lattice import Drafts, Lattice, best_drafts
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.search.finite import check_alpha
from bpd_jax.ngrams.search.host import PathSearch
from bpd_jax.typing import AnyArray, Int


class ViterbiRescorer:
    """The P best distinct drafts under Σ log p_head + α · log p_ngram (section 7.2).

    The certain first token is part of the n-gram's context and is not scored.
    """

    on_device = False
    arrays = None

    def __init__(self, model: NGramModel, num_drafts: int, alpha: float = 1.0) -> None:
        """Makes the tables of the search.

        Args:
          model: a back-off n-gram model over the same token ids; what it has no
            probability for gets log-probability -1000 (`with_finite_scores`).
          num_drafts: P, the paper's p.
          alpha: weight of the n-gram's log-probability.

        Raises:
          UserError: numba is not installed, or alpha is negative.
        """
        check_alpha(alpha)
        self.num_drafts = num_drafts
        self.alpha = alpha
        self.context_length = max(model.order - 2, 0)
        self._search = PathSearch(model)

    def with_drafts(self, num_drafts: int) -> "ViterbiRescorer":
        """Returns a rescorer of another P that shares the tables."""
        other = copy.copy(self)
        other.num_drafts = num_drafts
        return other

    def refine(
        self, lattice: Lattice, context: Int[AnyArray, "B C"], arrays: None = None
    ) -> Drafts:
        """Returns numpy arrays `[B, P, L]` int32 and `[B, P]` float32."""
        del arrays
        columns = np.asarray(lattice.tokens)
        log_probs = np.asarray(lattice.log_probs)
        batch, length, _ = columns.shape
        if length == 1:  # Nothing but the certain token.
            return best_drafts(lattice, self.num_drafts)
        tokens = np.zeros((batch, self.num_drafts, length), np.int32)
        scores = np.full((batch, self.num_drafts), -np.inf, np.float32)
        for row, text in enumerate(np.asarray(context)):
            certain = columns[row, 0, 0]
            choices, found = self._search.best_paths(
                columns[row, 1:],
                log_probs[row, 1:],
                np.append(text[text >= 0], certain),
                self.num_drafts,
                self.alpha,
            )
            tokens[row, :, 0] = certain
            places = np.arange(length - 1)
            tokens[row, : len(found), 1:] = columns[row, 1:][places, choices]
            scores[row, : len(found)] = found
        return Drafts(tokens, scores)
