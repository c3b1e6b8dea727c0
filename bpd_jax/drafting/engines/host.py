"""Base of the n-gram engines on the host: numpy arrays, row by row."""

import abc
import copy
from typing import Self

import numpy as np

from bpd_jax.drafting.lattice import Drafts, Lattice, best_drafts
from bpd_jax.ngrams.search.finite_scores import check_alpha
from bpd_jax.typing import AnyArray, Int


class HostEngine(abc.ABC):
    """The P best distinct drafts under Σ log p_head + α · log p_ngram (section 7.2).

    The certain first token is part of the n-gram's context and is not scored. An engine
    and its copies `with_weight` share their tables, and are for one thread.

    Attributes:
      alpha: weight of the n-gram's log-probability.
      alpha_slope: how the weight grows with a head's entropy; see `Weight`.
      context_length: tokens of text before the block that matter, besides its first.
    """

    def __init__(self, order: int, alpha: float, alpha_slope: float = 0.0) -> None:
        """Takes N and α.

        Raises:
          UserError: alpha is negative.
        """
        check_alpha(alpha)
        self.alpha = alpha
        self.alpha_slope = alpha_slope
        self.context_length = max(order - 2, 0)

    def with_weight(self, alpha: float, alpha_slope: float = 0.0) -> Self:
        """Returns an engine with another weight that shares the tables.

        Raises:
          UserError: alpha is negative.
        """
        check_alpha(alpha)
        other = copy.copy(self)
        other.alpha, other.alpha_slope = alpha, alpha_slope
        return other

    def refine(
        self, lattice: Lattice, context: Int[AnyArray, "B C"], num_drafts: int
    ) -> Drafts:
        """The P best distinct drafts.

        Args:
          lattice: candidates of the block.
          context: the last C tokens of the text, -1 before its beginning.
          num_drafts: P.

        Returns:
          Numpy arrays `[B, P, L]` int32 and `[B, P]` float32.
        """
        columns = np.asarray(lattice.tokens)
        log_probs = np.asarray(lattice.log_probs)
        entropies = np.asarray(lattice.entropies, np.float64)[:, 1:]
        alphas = np.maximum(self.alpha + self.alpha_slope * entropies, 0.0)
        batch, length, _ = columns.shape
        if length == 1:  # Nothing but the certain token.
            return best_drafts(lattice, num_drafts)
        tokens = np.zeros((batch, num_drafts, length), np.int32)
        scores = np.full((batch, num_drafts), -np.inf, np.float32)
        for row, text in enumerate(np.asarray(context)):
            certain = columns[row, 0, 0]
            paths, found = self._best_paths(
                columns[row, 1:],
                log_probs[row, 1:],
                np.append(text[text >= 0], certain),
                alphas[row],
                num_drafts,
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
        num_drafts: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the best token sequences `[n, J]` and scores `[n]`, n at most P.

        Args:
          tokens: `[J, W]`, the candidates after the certain token.
          log_probs: `[J, W]`, their scores.
          history: `[H]`, the text, the certain token included.
          alphas: `[J]`, the weight at each position.
          num_drafts: P.
        """
