"""Exact acceptance: the longest path of the draft tree that the model agrees with."""

import flax.struct
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Int
from bpd_jax.drafting.draft_tree import DraftTree, take


@flax.struct.dataclass
class Accepted:
    """The accepted draft of every row.

    Attributes:
      path: its nodes from the root to a leaf, including rejected ones, padded with -1.
      count: number of accepted nodes, at least 1.
      rank: its rank among the drafts.
      following: the model's choice after each of its nodes; the one after the last
        accepted node is the certain token of the next call.
    """

    path: Int[Array, "B L"]
    count: Int[Array, " B"]
    rank: Int[Array, " B"]
    following: Int[Array, "B L"]


def path_through(
    tree: DraftTree,
    deepest: Int[Array, " B"],
    choices: Int[Array, "B M"],
    max_depth: int,
) -> Accepted:
    """The path from the root through `deepest` to a leaf.

    Args:
      deepest: the last accepted node of every row.
      choices: the model's next token after every node.
      max_depth: number of nodes on the longest path.
    """

    def at(values: Array, node: Array) -> Array:
        return jnp.take_along_axis(values, node[:, None], axis=1)[:, 0]

    def put(path: Array, node: Array) -> Array:
        here = jnp.arange(max_depth) == at(tree.depths, node)[:, None]
        return jnp.where(here & (node >= 0)[:, None], node[:, None], path)

    # First up to the root, then down along first children.
    count = at(tree.depths, deepest) + 1
    path = jnp.full((tree.tokens.shape[0], max_depth), -1, jnp.int32)
    node = deepest
    for _ in range(max_depth):
        path = put(path, node)
        node = jnp.where(node < 0, -1, at(tree.parents, jnp.maximum(node, 0)))
    node = deepest
    for _ in range(max_depth - 1):
        children = (tree.parents == node[:, None]) & tree.valid & (node >= 0)[:, None]
        node = jnp.where(children.any(1), jnp.argmax(children, axis=1), -1)
        path = put(path, node)
    following = jnp.take_along_axis(choices, jnp.maximum(path, 0), axis=1)
    return Accepted(path, count, at(tree.ranks, deepest), following)


def longest_match(
    tree: DraftTree,
    choices: Int[Array, "B M"],
    next_token: Int[Array, " B"],
    max_depth: int,
) -> Accepted:
    """Accepts the longest path whose tokens are the model's choices.

    Worked example: the text continues with `a b c e`, and the drafts are `a b x` and `a
    b c`. The model's choice after `a` is `b`, and after `b` it is `c`: both `b` are
    accepted and `x` is rejected. The second draft is accepted with 3 tokens, and the
    model's choice after `c`, `e`, is the certain token of the next call.

    Args:
      choices: the model's next token after every node.
      next_token: the certain token, which an accepted root must equal.
    """
    expected = jnp.where(
        tree.parents < 0, next_token[:, None], take(choices, tree.parents)
    )
    accepted = accepted_nodes(tree, tree.tokens == expected, max_depth)
    # Of several deepest nodes, argmax takes the first one, which is the best ranked.
    deepest = jnp.argmax(jnp.where(accepted, tree.depths, -1), axis=1)
    return path_through(tree, deepest, choices, max_depth)


def accepted_nodes(
    tree: DraftTree, matches: Bool[Array, "B M"], max_depth: int
) -> Bool[Array, "B M"]:
    """The valid nodes that match together with all their ancestors."""
    matches &= tree.valid
    accepted = matches & (tree.parents < 0)
    for _ in range(max_depth - 1):
        accepted |= matches & take(accepted, tree.parents) & (tree.parents >= 0)
    return accepted
