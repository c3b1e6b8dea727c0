"""Merging of equal prefixes of draft trees, and unrolling of trees into chains."""

import dataclasses

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Int
from bpd_jax.drafting.draft_tree import DraftTree, take


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
