"""What the rescorers on the host have in common: numpy arrays, row by row."""

import abc
import copy
from typing import Self

import numpy as np

from bpd_jax.drafting.lattice import Drafts, Lattice, best_drafts
from bpd_jax.ngrams.search.finite import check_alpha
from bpd_jax.typing import AnyArray, Int


class HostRescorer(abc.ABC):
    """The P best distinct drafts under Σ log p_head + α · log p_ngram (section 7.2).

    The certain first token is part of the n-gram's context and is not scored. An object
    and its copies `with_drafts` share what they are made of, and are for one thread.

    Attributes:
      num_drafts: P, the paper's p.
      alpha: weight of the n-gram's log-probability.
      alpha_slope: how the weight grows with a head's entropy; see `Weight`.
      context_length: tokens of text before the block that matter, besides its first.
    """

    on_device = False
    arrays = None

    def __init__(
        self, order: int, num_drafts: int, alpha: float, alpha_slope: float = 0.0
    ) -> None:
        """Takes N, P and α.

        Raises:
          UserError: alpha is negative.
        """
        check_alpha(alpha)
        self.num_drafts = num_drafts
        self.alpha = alpha
        self.alpha_slope = alpha_slope
        self.context_length = max(order - 2, 0)

    def with_drafts(self, num_drafts: int) -> Self:
        """Returns a rescorer of another P that shares the model."""
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
        entropies = np.asarray(lattice.entropies, np.float64)[:, 1:]
        alphas = np.maximum(self.alpha + self.alpha_slope * entropies, 0.0)
        batch, length, _ = columns.shape
        if length == 1:  # Nothing but the certain token.
            return best_drafts(lattice, self.num_drafts)
        tokens = np.zeros((batch, self.num_drafts, length), np.int32)
        scores = np.full((batch, self.num_drafts), -np.inf, np.float32)
        for row, text in enumerate(np.asarray(context)):
            certain = columns[row, 0, 0]
            paths, found = self._best_paths(
                columns[row, 1:],
                log_probs[row, 1:],
                np.append(text[text >= 0], certain),
                alphas[row],
            )
            tokens[row, :, 0] = certain
            tokens[row, : len(found), 1:] = paths
            scores[row, : len(found)] = found
        return Drafts(tokens, scores)

    @abc.abstractmethod
    def _best_paths(
        self,
        tokens: np.ndarray,
        log_probs: np.ndarray,
        history: np.ndarray,
        alphas: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the best token sequences `[n, J]` and scores `[n]`, n at most P.

        Args:
          tokens: `[J, W]`, the candidates after the certain token.
          log_probs: `[J, W]`, their scores.
          history: `[H]`, the text, the certain token included.
          alphas: `[J]`, the weight at each position.
        """
