"""n-gram refinement on the host, exact: dynamic programming over the histories."""

import numpy as np

from bpd_jax.drafting.rescorers.host import HostRescorer
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.search.host import PathSearch


class ViterbiRescorer(HostRescorer):
    """The exact search compiled for the host; see `bpd_jax.ngrams.search.host`."""

    def __init__(
        self,
        model: NGramModel,
        num_drafts: int,
        alpha: float = 1.0,
        *,
        alpha_slope: float = 0.0,
    ) -> None:
        """Makes the tables of the search.

        Args:
          model: a back-off n-gram model over the same token ids; what it has no
            probability for gets log-probability -1000 (`with_finite_scores`).
          num_drafts: P, the paper's p.
          alpha: weight of the n-gram's log-probability.
          alpha_slope: how the weight grows with a head's entropy; see `Weight`.

        Raises:
          UserError: numba is not installed, or alpha is negative.
        """
        super().__init__(model.order, num_drafts, alpha, alpha_slope)
        self._search = PathSearch(model)

    def _best_paths(
        self,
        tokens: np.ndarray,
        log_probs: np.ndarray,
        history: np.ndarray,
        alphas: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        choices, scores = self._search.best_paths(
            tokens, log_probs, history, self.num_drafts, alphas
        )
        return tokens[np.arange(len(tokens)), choices], scores
