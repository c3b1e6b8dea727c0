"""N-gram engines on the host: their base class, and the drafter that calls one."""

import abc
import copy
import dataclasses
from typing import Self

import numpy as np

from bpd_jax.base.settings import check_value, number
from bpd_jax.base.typing import AnyArray, Array, Float, Int, PyTree
from bpd_jax.drafting.draft_tree import DraftTree, from_drafts
from bpd_jax.drafting.interface import View
from bpd_jax.drafting.lattice import Drafts, Lattice, best_drafts
from bpd_jax.drafting.path_drafter import PathDrafter
from bpd_jax.drafting.searches.growth import ChainSearch


class HostEngine(abc.ABC):
    """The P best distinct drafts under Σ log p_head + α · log p_ngram (section 7.2).

    The certain token is part of the n-gram's context and is not scored. Tokens without
    a probability get log-probability -1000 (`NGramModel.with_finite_scores`). An engine
    and the copies made by `with_weight` share their tables. Programs of several methods
    are compiled, and then run, in several threads at once.

    Attributes:
      alpha: weight of the n-gram's log-probability.
      alpha_slope: slope of the weight; see `Weight`.
      context_length: number of tokens before the certain token that are read.
    """

    def __init__(self, order: int, alpha: float, alpha_slope: float = 0.0) -> None:
        """Sets the order N of the model and the weight α."""
        check_value("alpha", alpha, number(0))
        self.alpha = alpha
        self.alpha_slope = alpha_slope
        self.context_length = max(order - 2, 0)

    def with_weight(self, alpha: float, alpha_slope: float = 0.0) -> Self:
        """Returns an engine with another weight, which shares the tables."""
        other = copy.copy(self)
        other.alpha, other.alpha_slope = alpha, alpha_slope
        return other

    def refine(
        self, lattice: Lattice, context: Int[AnyArray, "B C"], num_drafts: int
    ) -> Drafts:
        """The P best distinct drafts.

        Args:
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
        if length == 1:  # The certain token only.
            return best_drafts(lattice, num_drafts)
        tokens = np.zeros((batch, num_drafts, length), np.int32)
        scores = np.full((batch, num_drafts), -np.inf, np.float32)
        for row, text in enumerate(np.asarray(context)):
            certain = columns[row, 0, 0]
            paths, path_scores = self._best_paths(
                columns[row, 1:],
                log_probs[row, 1:],
                np.append(text[text >= 0], certain),
                alphas[row],
                num_drafts,
            )
            tokens[row, :, 0] = certain
            tokens[row, : len(paths), 1:] = paths
            scores[row, : len(paths)] = path_scores
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
          log_probs: `[J, W]`, their log-probabilities.
          history: `[H]`, the text, including the certain token.
          alphas: `[J]`, the weight at each position.
          num_drafts: P.
        """


@dataclasses.dataclass(frozen=True)
class HostDrafter(PathDrafter):
    """Builds the lattice on the device; an engine on the host does the search.

    Attributes:
      search: the search, with the number of drafts P.
      context_length: number of tokens before the block that the engine reads.
    """

    search: ChainSearch
    context_length: int
    engine: HostEngine = dataclasses.field(compare=False)

    @property
    def on_device(self) -> bool:
        """False: the engine runs on the host."""
        return False

    def look(self, view: View, arrays: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the lattice and the text before it."""
        (state, *_), memory = super().look(view, arrays, memory)
        assert state.lattice is not None
        return (state.lattice, view.last_tokens(self.context_length)), memory

    def propose(self, seen: PyTree, arrays: PyTree) -> DraftTree:
        """Returns the engine's drafts as chains."""
        lattice, context = seen
        drafts = self.engine.refine(lattice, context, self.search.num_drafts)
        return from_drafts(drafts)

    def entropies(self, seen: PyTree) -> Float[Array, "B L"]:
        """Entropies of the heads."""
        return seen[0].entropies
