"""Draft trees: what every method proposes, and what one forward pass checks."""

import flax.struct
import jax.numpy as jnp

from bpd_jax.drafting.lattice import Drafts
from bpd_jax.typing import Array, Bool, Int


@flax.struct.dataclass
class DraftTree:
    """M draft tokens per row, each with its parent; several roots are allowed.

    A parent stands before its children. Worked example, the drafts `a b c` and
    `a b d` as two chains (`from_drafts`):

        node     0  1  2  3  4  5
        token    a  b  c  a  b  d
        parent  -1  0  1 -1  3  4
        depth    0  1  2  0  1  2
        rank     0  0  0  1  1  1

    Attributes:
      tokens: the draft tokens.
      parents: index of each node's parent, -1 at a root.
      depths: steps from the root; a root continues the text directly.
      ranks: the best rank among the drafts that pass through the node.
      valid: False for padding.
    """

    tokens: Int[Array, "B M"]
    parents: Int[Array, "B M"]
    depths: Int[Array, "B M"]
    ranks: Int[Array, "B M"]
    valid: Bool[Array, "B M"]


def from_drafts(drafts: Drafts) -> DraftTree:
    """P drafts as P chains side by side, M = P × L (the paper's batch of drafts).

    The chains share the text's cache and are checked in one forward pass.
    """
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
    )


def ancestor_mask(tree: DraftTree, max_depth: int) -> Bool[Array, "B M M"]:
    """`mask[b, i, j]`: node j is node i or one of its ancestors.

    Args:
      tree: the drafts.
      max_depth: the number of nodes on the longest path from a root.
    """
    size = tree.tokens.shape[1]
    node = jnp.arange(size)
    ancestor = jnp.broadcast_to(node, tree.parents.shape)
    mask = jnp.zeros((*tree.parents.shape, size), bool)
    for _ in range(max_depth):
        mask |= ancestor[:, :, None] == node
        parent = jnp.take_along_axis(tree.parents, jnp.maximum(ancestor, 0), axis=1)
        # -1 is nobody's index, so a climb past the root marks nothing.
        ancestor = jnp.where(ancestor < 0, -1, parent)
    return mask
