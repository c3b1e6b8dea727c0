"""Greedy walks and beams: the paths as chains."""

import dataclasses

import jax.numpy as jnp

from bpd_jax.drafting.lattice import Drafts
from bpd_jax.drafting.paths.interface import PathModel
from bpd_jax.drafting.searches.growth import grow_best
from bpd_jax.drafting.tree import DraftTree, from_drafts, take
from bpd_jax.typing import Array, Int, PyTree


@dataclasses.dataclass(frozen=True)
class Beam:
    """The P best paths that a beam of P finds; P = 1 walks greedily.

    Attributes:
      num_drafts: P.
      normalise: whether candidates are normalised after every path, so that a score is
        a probability: right for refiners that were trained so.
    """

    num_drafts: int = 1
    normalise: bool = False

    def max_nodes(self, block_size: int, width: int) -> int:
        """Different prefixes of P paths."""
        return most_prefixes(block_size, width, self.num_drafts)

    def max_drafts(self, block_size: int, width: int) -> int:
        """P, or all paths if they are fewer."""
        return most_paths(block_size, width, self.num_drafts)

    @property
    def draws(self) -> bool:
        """Never."""
        return False

    def grow(
        self,
        model: PathModel,
        arrays: PyTree,
        state: PyTree,
        first: Int[Array, " B"],
        key: Array | None = None,
    ) -> DraftTree:
        """Returns the paths as chains, best first."""
        del key
        count = self.max_drafts(model.block_size, model.width)
        levels = grow_best(model, arrays, state, first, count, normalise=self.normalise)
        at = jnp.broadcast_to(jnp.arange(count), (first.shape[0], count))
        tokens = []
        for level in reversed(levels):
            tokens.append(take(level.tokens, at))
            at = take(level.parents, at)
        drafts = Drafts(jnp.stack(tokens[::-1], axis=-1), levels[-1].scores)
        return from_drafts(drafts)


def most_paths(block_size: int, width: int, count: int) -> int:
    """`count`, or the number of all paths if that is less."""
    # Python's integers do not overflow.
    return min(count, width ** (block_size - 1))


def most_prefixes(block_size: int, width: int, count: int) -> int:
    """The most different prefixes that `count` paths can have."""
    return sum(min(count, width**depth) for depth in range(block_size))
