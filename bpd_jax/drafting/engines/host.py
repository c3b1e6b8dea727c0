"""N-gram engines on the host: their base class, and the drafter that calls one."""

import abc
import copy
import dataclasses
from typing import Self

import numpy as np

from bpd_jax.base.settings import check_value, number
from bpd_jax.base.typing import AnyArray, Array, Float, Int, PyTree
from bpd_jax.drafting.draft_tree import DraftTree, from_drafts, sizes_of_drafts
from bpd_jax.drafting.interface import Outcome, Prompts, SourceDrafter, View
from bpd_jax.drafting.lattice import (
    Drafts,
    Lattice,
    best_drafts,
    most_paths,
    most_prefixes,
)


class HostEngine(abc.ABC):
    """The P best distinct drafts under Σ log p_head + α · log p_ngram (section 7.2).

    The certain token is part of the n-gram's context and is not scored. Tokens without
    a probability get log-probability -1000 (`NGramModel.with_finite_scores`). An engine
    and the copies made by `with_weight` share their tables and are not thread-safe.

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


# The inputs of an engine: a lattice and the text before it.
EngineInputs = tuple[Lattice, Int[Array, "B C"]]


@dataclasses.dataclass(frozen=True)
class HostDrafter(SourceDrafter):
    """Builds the lattice on the device and searches it on the host.

    Attributes:
      num_drafts: P.
      context_length: number of tokens before the block that the engine reads.
    """

    num_drafts: int
    context_length: int
    engine: HostEngine = dataclasses.field(compare=False)
    on_device: bool = dataclasses.field(default=False, init=False)

    @property
    def max_nodes(self) -> int:
        """Distinct prefixes of P drafts."""
        return most_prefixes(self.max_depth, self.source.width, self.num_drafts)

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """See `sizes_of_drafts`."""
        return sizes_of_drafts(self.max_depth, self.source.width, self.num_drafts)

    @property
    def max_drafts(self) -> int:
        """P, or all paths if they are fewer."""
        return most_paths(self.max_depth, self.source.width, self.num_drafts)

    def start(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        return self.source.remember(arrays, prompts)

    def look(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[EngineInputs, PyTree]:
        """Returns the lattice and the text before it."""
        state, memory = self.source.start(view, arrays, memory)
        lattice = self.source.lattice(state)
        assert lattice is not None
        return (lattice, view.last_tokens(self.context_length)), memory

    def propose(self, seen: EngineInputs, arrays: PyTree) -> DraftTree:
        """Returns the engine's drafts as chains."""
        return from_drafts(self.engine.refine(*seen, self.num_drafts))

    def learn(self, arrays: PyTree, memory: PyTree, outcome: Outcome) -> PyTree:
        """The memory of the source after a serial call."""
        return self.source.learn(arrays, memory, outcome)

    def entropies(self, seen: EngineInputs) -> Float[Array, "B L"]:
        """Entropies of the heads."""
        return seen[0].entropies
