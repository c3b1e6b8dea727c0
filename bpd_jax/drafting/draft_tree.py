"""Draft trees, which methods propose and one forward pass verifies.

Trees are made of chains and of parents, their equal prefixes are merged, and where the
model reads one text at a time they are unrolled into chains again.
"""

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import AnyArray, Array, Bool, Float, Int
from bpd_jax.drafting.lattice import Drafts


@flax.struct.dataclass
class NodeOrigins:
    """The distributions that children were sampled from, for speculative sampling.

    The children of each node were sampled without replacement, in the order of their
    indices, from a distribution over W candidates.

    Attributes:
      tokens: the candidates; those with a probability above 0 are distinct.
      log_probs: their log-probabilities, because probabilities underflow in float32 at
        low temperatures; -inf for probability 0.
    """

    tokens: Int[Array, "B M W"]
    log_probs: Float[Array, "B M W"]


@flax.struct.dataclass
class DraftTree:
    """M draft tokens per row, each with its parent; several roots are allowed.

    Parents come before their children. Worked example: the drafts `a b c` and `a b d`
    as two chains (`from_drafts`), and with merged prefixes
    (`merge_prefixes`):

        node     0  1  2  3  4  5        0  1  2  3
        token    a  b  c  a  b  d        a  b  c  d
        parent  -1  0  1 -1  3  4       -1  0  1  1
        depth    0  1  2  0  1  2        0  1  2  2
        rank     0  0  0  1  1  1        0  0  0  1

    Attributes:
      tokens: the draft tokens.
      parents: index of each node's parent, -1 at a root.
      depths: number of steps from the root, which follows the text.
      ranks: the best rank of the drafts through the node.
      valid: False for padding.
      sources: distributions of sampled children; None if they were not sampled.
      num_chains: P if the nodes are P consecutive chains of equal length, otherwise 0;
        static.
    """

    tokens: Int[Array, "B M"]
    parents: Int[Array, "B M"]
    depths: Int[Array, "B M"]
    ranks: Int[Array, "B M"]
    valid: Bool[Array, "B M"]
    sources: NodeOrigins | None = None
    num_chains: int = flax.struct.field(pytree_node=False, default=0)

    @property
    def size(self) -> int:
        """M."""
        return self.tokens.shape[1]

    def first(self, size: int) -> "DraftTree":
        """The first `size` nodes."""
        return jax.tree.map(lambda values: values[:, :size], self)


def from_drafts(drafts: Drafts) -> DraftTree:
    """P drafts as P chains, M = P × L (the paper's batch of drafts)."""
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


def from_chain(tokens: Int[Array, "B L"]) -> DraftTree:
    """One draft per row, with score 0; see `from_drafts`."""
    scores = jnp.zeros((len(tokens), 1), jnp.float32)
    return from_drafts(Drafts(tokens[:, None], scores))


def usual_sizes(most: int) -> tuple[int, ...]:
    """`Drafter.pass_sizes` of trees whose number of nodes varies between calls.

    A quarter and half of the highest number, if they are at least 8; three quarters of
    64 nodes or more, too: 16 drafts of 9 tokens have 68 nodes on average, 129 at most.

    >>> usual_sizes(129), usual_sizes(17), usual_sizes(12)
    ((33, 65, 97, 129), (9, 17), (12,))
    """
    quarters = (1, 2, 3) if most >= 64 else (1, 2)
    sizes = (-(-most * quarter // 4) for quarter in quarters)
    return (*(size for size in sizes if size >= 8), most)


def ancestor_mask(parents: Int[Array, "B M"], max_depth: int) -> Bool[Array, "B M M"]:
    """The tree attention mask: `mask[b, i, j]` if node j is i or an ancestor of i.

    Args:
      parents: parents of the nodes, -1 at a root.
      max_depth: number of nodes on the longest path.
    """
    node = jnp.arange(parents.shape[1])
    # No node has index -1, so a root has only itself.
    mask = (parents[:, :, None] == node) | (node[:, None] == node)
    # The ancestors of ancestors are twice as far. XLA fuses no product with the code
    # that reads the mask, which it would compute again in every layer.
    for _ in range(math.ceil(math.log2(max(max_depth - 1, 1)))):
        steps = mask.astype(jnp.float32)
        mask = jnp.einsum("bij,bjk->bik", steps, steps) > 0
    return mask


def take(values: Array, nodes: AnyArray) -> Array:
    """`values[b, nodes[b]]` for every row; index -1 gives the first entry."""
    return jax.vmap(lambda row, index: row[index])(values, jnp.maximum(nodes, 0))


def merge_prefixes(tree: DraftTree, max_nodes: int, max_depth: int) -> DraftTree:
    """Merges nodes with equal prefixes, so that no prefix is verified twice.

    The first of these nodes is kept, with their best rank, so that the children of a
    node remain sorted by rank. Worked example: see `DraftTree`.

    Args:
      tree: chains or a tree; sampled children (`sources`) cannot be merged.
      max_nodes: highest number of distinct prefixes; additional nodes with the highest
        indices are dropped.
      max_depth: number of nodes on the longest path.
    """
    size = tree.size
    node = jnp.arange(size)
    alike = (tree.tokens[:, :, None] == tree.tokens[:, None]) & (
        tree.depths[:, :, None] == tree.depths[:, None]
    )
    alike &= tree.valid[:, :, None] & tree.valid[:, None]
    first = jnp.broadcast_to(node, tree.parents.shape)
    parent = tree.parents
    for _ in range(max_depth):
        # Every iteration resolves the nodes of one more depth.
        same = alike & (parent[:, :, None] == parent[:, None])
        first = jnp.where(tree.valid, jnp.argmax(same, axis=2), node)
        parent = jnp.where(tree.parents < 0, -1, take(first, tree.parents))
    rank = jnp.where(tree.valid, tree.ranks, size)
    rank = jnp.where(first[:, None] == node[:, None], rank[:, None], size).min(-1)
    keep = tree.valid & (first == node)
    # A stable sort moves kept nodes to the front and preserves their order.
    kept = jnp.argsort(~keep, axis=1, stable=True)[:, :max_nodes]
    new_index = jnp.cumsum(keep, axis=1) - 1
    parents = take(parent, kept)
    return DraftTree(
        tokens=take(tree.tokens, kept),
        parents=jnp.where(parents < 0, -1, take(new_index, parents)),
        depths=take(tree.depths, kept),
        ranks=take(rank, kept),
        valid=take(keep, kept),
    )


def unroll(
    tree: DraftTree, max_drafts: int, max_depth: int
) -> tuple[Int[Array, "B P L"], Int[Array, "B M"]]:
    """Unrolls a tree into one chain for each of its leaves, in their order.

    Args:
      tree: a tree with at most `max_drafts` leaves.
      max_drafts: P.
      max_depth: L.

    Returns:
      The node at each position of each chain, -1 past the end of a chain; and one
      position of every node in the chains, as an index into P × L.
    """
    batch, size = tree.tokens.shape
    node = jnp.arange(size)
    parents = jnp.where(tree.valid, tree.parents, -1)
    inner = (parents[:, None] == node[:, None]).any(-1)
    leaf = tree.valid & ~inner
    order = jnp.argsort(~leaf, axis=1, stable=True)[:, :max_drafts]
    order = jnp.pad(order, ((0, 0), (0, max_drafts - order.shape[1])))
    used = jnp.arange(max_drafts) < leaf.sum(1, keepdims=True)
    at = jnp.where(used, order, -1)
    nodes = jnp.full((batch, max_drafts, max_depth), -1, jnp.int32)
    depth = jnp.arange(max_depth)
    for _ in range(max_depth):
        at_depth = (depth == take(tree.depths, at)[:, :, None]) & (at >= 0)[:, :, None]
        nodes = jnp.where(at_depth, at[:, :, None], nodes)
        at = jnp.where(at < 0, -1, take(tree.parents, at))
    flat = nodes.reshape(batch, -1)
    positions = jnp.argmax(flat[:, None] == node[:, None], axis=2)
    return nodes, positions


def union(first: DraftTree, second: DraftTree) -> DraftTree:
    """Two trees without `sources` side by side; drafts of `first` rank first."""
    offset = first.size
    behind = first.ranks.max(axis=1, keepdims=True) + 1
    moved = dataclasses.replace(
        second,
        parents=jnp.where(second.parents < 0, -1, second.parents + offset),
        ranks=second.ranks + behind,
        num_chains=0,
    )
    return jax.tree.map(
        lambda one, other: jnp.concatenate([one, other], axis=1),
        dataclasses.replace(first, num_chains=0),
        moved,
    )
