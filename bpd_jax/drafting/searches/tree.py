"""A tree of the M most probable prefixes: a node budget spent where it pays."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.drafting.parts import (
    COUNT,
    NODES,
    BuildContext,
    GrowingPart,
    register,
)
from bpd_jax.drafting.paths import Paths
from bpd_jax.drafting.searches.growth import grow_best
from bpd_jax.drafting.tree import DraftTree, take, usual_sizes
from bpd_jax.settings import number as number_check
from bpd_jax.settings import setting
from bpd_jax.typing import Array, Int, PyTree


@dataclasses.dataclass(frozen=True)
class BestFirst:
    """The M prefixes that are most probable under source and refiners.

    A prefix counts with the product of its candidates' normalised probabilities, an
    estimate of the chance that all of it is accepted, so that the sum over the tree
    estimates the accepted length. A prefix is never more probable than what it
    continues: the M best of every length contain the M best of all, and whatever is
    chosen has its parent chosen too.

    Attributes:
      num_nodes: M, the certain token included.
      min_prob: the smallest probability of a prefix that is drafted.
    """

    num_nodes: int
    min_prob: float = 0.0

    def max_nodes(self, block_size: int, width: int) -> int:
        """M, or all prefixes if they are fewer."""
        return min(self.num_nodes, sum(width**depth for depth in range(block_size)))

    def max_drafts(self, block_size: int, width: int) -> int:
        """Leaves: all nodes but the root might be."""
        return max(self.max_nodes(block_size, width) - 1, 1)

    @property
    def draws(self) -> bool:
        """Never."""
        return False

    def grow(
        self,
        paths: Paths,
        arrays: PyTree,
        state: PyTree,
        first: Int[Array, " B"],
        key: Array | None = None,
    ) -> DraftTree:
        """Returns the tree; ranks are the order of the nodes' probabilities."""
        del key
        batch, length = first.shape[0], paths.block_size
        size = self.max_nodes(length, paths.width)
        levels = grow_best(paths, arrays, state, first, size, normalise=True)
        sizes = [level.tokens.shape[1] for level in levels]
        pool = sum(sizes)
        scores = jnp.concatenate([level.scores for level in levels], axis=1)
        sizes_of_tree: tuple[int, ...] = ()
        if self.min_prob > 0:
            scores = jnp.where(scores < np.log(self.min_prob), -jnp.inf, scores)
            sizes_of_tree = usual_sizes(size)
        # Equal scores go to the lower index, hence to the parent.
        best_scores, best = jax.lax.top_k(scores, size)
        # Nodes that exist stand before those that do not, and parents before children.
        chosen = jnp.sort(best + pool * jnp.isneginf(best_scores), axis=1) % pool
        rank_in_pool = jax.vmap(
            lambda row: jnp.zeros(pool, jnp.int32).at[row].set(jnp.arange(size))
        )(best)
        place_in_tree = jax.vmap(
            lambda row: jnp.zeros(pool, jnp.int32).at[row].set(jnp.arange(size))
        )(chosen)
        # The parents of level d stand in level d - 1, which begins after all before it.
        begins = [sum(sizes[:depth]) for depth in range(len(levels))]
        parents = jnp.concatenate(
            [levels[0].parents]
            + [levels[d].parents + begins[d - 1] for d in range(1, len(levels))],
            axis=1,
        )
        depths = jnp.repeat(jnp.arange(len(levels)), np.array(sizes))
        depths = jnp.broadcast_to(depths.astype(jnp.int32), (batch, pool))
        tokens = jnp.concatenate([level.tokens for level in levels], axis=1)
        parent = take(parents, chosen)
        return DraftTree(
            tokens=take(tokens, chosen),
            parents=jnp.where(parent < 0, -1, take(place_in_tree, parent)),
            depths=take(depths, chosen),
            ranks=take(rank_in_pool, chosen),
            valid=jnp.isfinite(take(scores, chosen)),
            sizes=sizes_of_tree,
        )


@register
@dataclasses.dataclass(frozen=True)
class Tree(GrowingPart):
    """Settings of the search `tree`."""

    name: ClassVar[str] = "tree"
    help: ClassVar[str] = "a tree of the M most probable prefixes"
    number: ClassVar[str] = "nodes"
    counts: ClassVar[str] = NODES

    nodes: int = setting(32, "nodes M, the certain token included", COUNT)
    min_prob: float = setting(
        0.0, "smallest probability of a prefix that is drafted", number_check(0, 1)
    )

    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> BestFirst:
        """Makes the search, which always normalises."""
        del context, paths, normalise
        return BestFirst(self.nodes, self.min_prob)

    def label(self, order: int | None = None) -> str:
        """What people read in tables."""
        del order
        cut = f", p ≥ {self.min_prob:g}" if self.min_prob else ""
        return f"Tree of {self.nodes}{cut}"
