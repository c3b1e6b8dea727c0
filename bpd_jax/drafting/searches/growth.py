"""Code that searches share: paths that are extended level by level."""

import abc
import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.settings import number
from bpd_jax.base.typing import Array, Float, Int, PyTree
from bpd_jax.drafting.draft_tree import (
    DraftTree,
    from_drafts,
    take,
    usual_sizes,
)
from bpd_jax.drafting.interface import Extension, Search
from bpd_jax.drafting.lattice import Drafts, Lattice, most_prefixes
from bpd_jax.drafting.path_drafter import PathArrays, Paths, PathState
from bpd_jax.drafting.refiners.transitions import Transitions, over_lattice

TEMPERATURE = ("divides scores before they are normalised", number(1e-3, 1e3))


@dataclasses.dataclass(frozen=True)
class ChainSearch(Search):
    """Base of searches whose drafts are P chains.

    Attributes:
      num_drafts: P, the paper's p.
    """

    num_drafts: int = 1

    def max_nodes(self, block_size: int, width: int) -> int:
        """Distinct prefixes of P paths."""
        return most_prefixes(block_size, width, self.num_drafts)

    def pass_sizes(self, block_size: int, width: int) -> tuple[int, ...]:
        """Several for several drafts, which share prefixes."""
        most = self.max_nodes(block_size, width)
        return usual_sizes(most) if self.num_drafts > 1 else (most,)

    def max_drafts(self, block_size: int, width: int) -> int:
        """P, or all paths if they are fewer."""
        return min(self.num_drafts, width ** (block_size - 1))


class LatticeSearch(ChainSearch):
    """Base of searches for P drafts of a lattice, under refiners with finite states."""

    @abc.abstractmethod
    def search(
        self, lattice: Lattice, transitions: Transitions | None, count: int
    ) -> Drafts:
        """Returns `count` drafts; without refiners there are no transitions."""

    def grow(
        self,
        paths: Paths,
        arrays: PathArrays,
        state: PathState,
        first: Int[Array, " B"],
        key: Array | None = None,
    ) -> DraftTree:
        """Returns the drafts as chains, best first."""
        count = self.max_drafts(paths.block_size, paths.width)
        assert state.lattice is not None
        assert not paths.others
        drafts = over_lattice(
            paths.finite,
            arrays.finite,
            state.lattice,
            state.inputs,
            functools.partial(self.search, count=count),
            transitions=None if state.finite is None else state.finite.transitions,
        )
        return from_drafts(drafts)


@flax.struct.dataclass
class Level:
    """Paths that end at the same position.

    Attributes:
      parents: index of the path of the previous level that each path extends.
      tokens: its last token.
      scores: its sum of log-probabilities; -inf for paths that do not exist.
    """

    parents: Int[Array, "B n"]
    tokens: Int[Array, "B n"]
    scores: Float[Array, "B n"]


def normalised(
    scores: Float[Array, "... W"], temperature: float = 1.0
) -> Float[Array, "... W"]:
    """Scores normalised over the W candidates of every path.

    Refined scores are not normalised; without this, paths of different lengths cannot
    be compared. Together with the probability of all candidates (`lattice.covered`)
    they are log q, the probability that a search gives a candidate after a path.

    Args:
      scores: sums of the scores of source and refiners.
      temperature: divides the scores: above 1, q is flatter, and searches prefer
        branches near the beginning of a draft.
    """
    log_probs = jax.nn.log_softmax(scores / temperature, axis=-1)
    # The softmax of candidates that are all -inf is undefined. NaN would rank first.
    return jnp.where(jnp.isfinite(log_probs), log_probs, -jnp.inf)


def grow_best(
    paths: Paths,
    arrays: PyTree,
    state: PyTree,
    first: Int[Array, " B"],
    beam: int,
    *,
    normalise: bool,
    temperature: float = 1.0,
    mass: bool = False,
) -> list[Level]:
    """Beam search: the `beam` best paths of every length, one level per position.

    The best prefixes need not be prefixes of the best paths: unless the beam holds all
    prefixes, this is exact only for independent heads. A beam of 1 is a greedy walk
    (paper, Algorithm 2).

    Args:
      beam: highest number of paths of a level.
      normalise: whether to normalise the candidates after every path.
      temperature: of this normalisation; see `normalised`.
      mass: whether to add the probability of all candidates.
    """
    batch = first.shape[0]
    levels = [
        Level(
            parents=jnp.full((batch, 1), -1, jnp.int32),
            tokens=first[:, None],
            scores=jnp.zeros((batch, 1)),
        )
    ]
    for position in range(1, paths.block_size):
        before = levels[-1]
        candidates = paths.candidates(arrays, state, position)
        steps = candidates.log_probs
        if normalise:
            steps = normalised(steps, temperature)
        if mass:
            steps += paths.covered(arrays, state, position)[..., None]
        totals = (before.scores[:, :, None] + steps).reshape(batch, -1)
        width = candidates.tokens.shape[-1]
        scores, chosen = jax.lax.top_k(totals, min(beam, totals.shape[1]))
        parents, picks = jnp.divmod(chosen, width)
        tokens = take(candidates.tokens.reshape(batch, -1), chosen)
        levels.append(Level(parents, tokens, scores))
        if position + 1 < paths.block_size:
            extension = Extension(parents, picks, tokens)
            state = paths.extend(arrays, state, position, extension)
    return levels
