"""Draft trees: what every method proposes, and what one forward pass checks."""

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.drafting.lattice import Drafts
from bpd_jax.typing import AnyArray, Array, Bool, Float, Int


@flax.struct.dataclass
class Sources:
    """Where the children of each node were drawn from, for speculative sampling.

    They were drawn one after the other without replacement, in the order of their
    indices, from a distribution over W candidates.

    Attributes:
      tokens: the candidates; those that can be drawn are different.
      log_probs: logarithms of their probabilities, because at low temperatures all but
        the best are too small for float32; -inf for what cannot be drawn.
    """

    tokens: Int[Array, "B M W"]
    log_probs: Float[Array, "B M W"]


@flax.struct.dataclass
class DraftTree:
    """M draft tokens per row, each with its parent; several roots are allowed.

    A parent stands before its children. Worked example, the drafts `a b c` and
    `a b d` as two chains (`from_drafts`), and with their prefixes merged
    (`bpd_jax.drafting.merging`):

        node     0  1  2  3  4  5        0  1  2  3
        token    a  b  c  a  b  d        a  b  c  d
        parent  -1  0  1 -1  3  4       -1  0  1  1
        depth    0  1  2  0  1  2        0  1  2  2
        rank     0  0  0  1  1  1        0  0  0  1

    Attributes:
      tokens: the draft tokens.
      parents: index of each node's parent, -1 at a root.
      depths: steps from the root; a root continues the text directly.
      ranks: the best rank among the drafts that pass through the node.
      valid: False for padding.
      sources: where children were drawn from; None if they were chosen without chance.
      num_chains: P if the nodes are P chains of equal length one after the other, else
        0; known when code is compiled.
      sizes: numbers of nodes less than M, ascending, that often hold all valid nodes: a
        pass is compiled for each, and the smallest that does is run. Known when code is
        compiled.
    """

    tokens: Int[Array, "B M"]
    parents: Int[Array, "B M"]
    depths: Int[Array, "B M"]
    ranks: Int[Array, "B M"]
    valid: Bool[Array, "B M"]
    sources: Sources | None = None
    num_chains: int = flax.struct.field(pytree_node=False, default=0)
    sizes: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())

    @property
    def size(self) -> int:
        """M."""
        return self.tokens.shape[1]

    def first(self, size: int) -> "DraftTree":
        """The first `size` nodes."""
        return jax.tree.map(lambda values: values[:, :size], self)


def from_drafts(drafts: Drafts) -> DraftTree:
    """P drafts as P chains side by side, M = P × L (the paper's batch of drafts)."""
    batch, count, length = drafts.tokens.shape
    node = jnp.arange(count * length, dtype=jnp.int32)
    depth, rank = node % length, node // length

    def per_row(values: Array) -> Array:
        return jnp.broadcast_to(values, (batch, count * length))

    return DraftTree(
        tokens=jnp.asarray(drafts.tokens).reshape(batch, -1),
        parents=per_row(jnp.where(depth == 0, -1, node - 1)),
        depths=per_row(depth),
        ranks=per_row(rank),
        valid=jnp.repeat(jnp.isfinite(drafts.scores), length, axis=1),
        num_chains=count,
    )


def usual_sizes(most: int) -> tuple[int, ...]:
    """Half and a quarter of the most nodes, as `DraftTree.sizes`; none below 8.

    >>> usual_sizes(129), usual_sizes(17), usual_sizes(12)
    ((33, 65), (9,), ())
    """
    return tuple(size for size in (-(-most // 4), -(-most // 2)) if size >= 8)


def ancestor_mask(parents: Int[Array, "B M"], max_depth: int) -> Bool[Array, "B M M"]:
    """`mask[b, i, j]`: node j is node i or one of its ancestors.

    Args:
      parents: of the nodes, -1 at a root.
      max_depth: the number of nodes on the longest path from a root.
    """
    size = parents.shape[1]
    node = jnp.arange(size)
    ancestor = jnp.broadcast_to(node, parents.shape)
    mask = jnp.zeros((*parents.shape, size), bool)
    for _ in range(max_depth):
        mask |= ancestor[:, :, None] == node
        parent = jnp.take_along_axis(parents, jnp.maximum(ancestor, 0), axis=1)
        # -1 is nobody's index, so a climb past the root marks nothing.
        ancestor = jnp.where(ancestor < 0, -1, parent)
    return mask


def take(values: Array, nodes: AnyArray) -> Array:
    """`values[b, nodes[b]]` for every row; index -1 gives the first entry."""
    return jax.vmap(lambda row, index: row[index])(values, jnp.maximum(nodes, 0))
