"""Exact n-gram refinement on the host: dynamic programming over histories."""

import numpy as np

from bpd_jax.drafting.engines.host import HostEngine
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.search.host_search import PathSearch


class ViterbiEngine(HostEngine):
    """The exact search on the host; see `bpd_jax.ngrams.search.host_search`."""

    def __init__(
        self,
        model: NGramModel,
        alpha: float = 1.0,
        *,
        alpha_slope: float = 0.0,
    ) -> None:
        """Builds the tables of the search.

        Args:
          model: a back-off n-gram model over the same token ids; tokens without a
            probability get log-probability -1000 (`with_finite_scores`).
          alpha: weight of the n-gram's log-probability.
          alpha_slope: slope of the weight; see `Weight`.
        """
        super().__init__(model.order, alpha, alpha_slope)
        self._search = PathSearch(model)

    def _best_paths(
        self,
        tokens: np.ndarray,
        log_probs: np.ndarray,
        history: np.ndarray,
        alphas: np.ndarray,
        num_drafts: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        choices, scores = self._search.best_paths(
            tokens, log_probs, history, num_drafts, alphas
        )
        return tokens[np.arange(len(tokens)), choices], scores
