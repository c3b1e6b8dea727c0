"""Best-first trees: the M most probable prefixes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.settings import SWITCH, number, setting
from bpd_jax.base.typing import Array, Int, PyTree
from bpd_jax.drafting.draft_tree import DraftTree, take, usual_sizes
from bpd_jax.drafting.interface import Search
from bpd_jax.drafting.parts import (
    COUNT,
    NODES,
    BuildContext,
    GrowingPart,
    register,
)
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.searches.growth import TEMPERATURE, grow_best


@dataclasses.dataclass(frozen=True)
class BestFirst(Search):
    """The M most probable prefixes under source and refiners.

    The probability of a prefix is the product of the normalised probabilities of its
    tokens, an estimate of the probability that it is accepted; the sum over the tree
    estimates the accepted length. A prefix is never more probable than its parent, so
    the M best of each length contain the M best overall, and the parent of a chosen
    prefix is chosen too.

    Attributes:
      num_nodes: M, number of nodes including the certain token.
      min_prob: lowest probability of a drafted prefix.
      temperature: see `growth.normalised`.
      mass: whether the probability of a token is multiplied by that of all candidates
        under the source, as in covering drafts.
    """

    num_nodes: int
    min_prob: float = 0.0
    temperature: float = 1.0
    mass: bool = False

    def max_nodes(self, block_size: int, width: int) -> int:
        """M, or the number of all prefixes if it is lower."""
        return min(self.num_nodes, sum(width**depth for depth in range(block_size)))

    def pass_sizes(self, block_size: int, width: int) -> tuple[int, ...]:
        """Several with a threshold, which leaves nodes unused."""
        most = self.max_nodes(block_size, width)
        return usual_sizes(most) if self.min_prob > 0 else (most,)

    def max_drafts(self, block_size: int, width: int) -> int:
        """Number of nodes without the root, all of which may be leaves."""
        return max(self.max_nodes(block_size, width) - 1, 1)

    def grow(
        self,
        paths: Paths,
        arrays: PyTree,
        state: PyTree,
        first: Int[Array, " B"],
        key: Array | None = None,
    ) -> DraftTree:
        """Returns the tree; nodes are ranked by probability."""
        batch, length = first.shape[0], paths.block_size
        size = self.max_nodes(length, paths.width)
        levels = grow_best(
            paths,
            arrays,
            state,
            first,
            size,
            normalise=True,
            temperature=self.temperature,
            mass=self.mass,
        )
        sizes = [level.tokens.shape[1] for level in levels]
        pool = sum(sizes)
        scores = jnp.concatenate([level.scores for level in levels], axis=1)
        if self.min_prob > 0:
            scores = jnp.where(scores < np.log(self.min_prob), -jnp.inf, scores)
        # Ties are broken by the lower index, which is that of the parent.
        best_scores, best = jax.lax.top_k(scores, size)
        # Valid nodes come before invalid ones, and parents before children.
        chosen = jnp.sort(best + pool * jnp.isneginf(best_scores), axis=1) % pool
        rank_in_pool = jax.vmap(
            lambda row: jnp.zeros(pool, jnp.int32).at[row].set(jnp.arange(size))
        )(best)
        index_in_tree = jax.vmap(
            lambda row: jnp.zeros(pool, jnp.int32).at[row].set(jnp.arange(size))
        )(chosen)
        # Indices of the first nodes of the levels.
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
            parents=jnp.where(parent < 0, -1, take(index_in_tree, parent)),
            depths=take(depths, chosen),
            ranks=take(rank_in_pool, chosen),
            valid=jnp.isfinite(take(scores, chosen)),
        )


@register
@dataclasses.dataclass(frozen=True)
class Tree(GrowingPart):
    """Settings of the search `tree`."""

    name = "tree"
    help = "a tree of the M most probable prefixes"
    number_setting = "nodes"
    counts = NODES
    joint = ", "

    nodes: int = setting(32, "nodes M, the certain token included", COUNT)
    min_prob: float = setting(
        0.0, "lowest probability of a drafted prefix", number(0, 1)
    )
    temperature: float = setting(1.0, *TEMPERATURE)
    mass: int = setting(
        0, "1 multiplies by the probability of all candidates, as cover does", SWITCH
    )
    price: float | None = setting(
        None,
        "draft only while calls yield more tokens than this, the time of a call with "
        "drafts in calls without",
        number(1).or_none(),
    )

    @property
    def reach(self) -> int:
        """M, if all nodes are one path."""
        return max(self.nodes, 2)

    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> BestFirst:
        """Builds the search, which always normalises scores."""
        return BestFirst(self.nodes, self.min_prob, self.temperature, bool(self.mass))

    def label(self, order: int | None = None) -> str:
        cut = f", p ≥ {self.min_prob:g}" if self.min_prob else ""
        return f"Tree of {self.nodes}{cut}"
