"""The outcome of acceptance: a path of the draft tree and the token after it."""

import flax.struct
import jax.numpy as jnp

from bpd_jax.drafting.tree import DraftTree
from bpd_jax.typing import Array, Int


@flax.struct.dataclass
class Accepted:
    """The winning draft of every row.

    Attributes:
      path: its nodes from the root, the rejected rest included, -1 past its end.
      count: how many of them are accepted, at least 1.
      rank: its rank among the drafts.
      following: the model's choice after each of its nodes. Behind the last accepted
        node stands the next call's certain token.
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
    """The path from the root to `deepest`, which is accepted, and on to a leaf.

    Args:
      tree: the drafts.
      deepest: the last accepted node of every row.
      choices: the model's next token at every node.
      max_depth: nodes on the longest path.
    """

    def at(values: Array, node: Array) -> Array:
        return jnp.take_along_axis(values, node[:, None], axis=1)[:, 0]

    # Up from the deepest node to the root, then down along first children.
    count = at(tree.depths, deepest) + 1
    path = jnp.full((tree.tokens.shape[0], max_depth), -1, jnp.int32)
    step = jnp.arange(max_depth)
    node = deepest
    for _ in range(max_depth):
        here = (step == at(tree.depths, node)[:, None]) & (node >= 0)[:, None]
        path = jnp.where(here, node[:, None], path)
        node = jnp.where(node < 0, -1, at(tree.parents, jnp.maximum(node, 0)))
    node = deepest
    for _ in range(max_depth - 1):
        children = (tree.parents == node[:, None]) & tree.valid & (node >= 0)[:, None]
        node = jnp.where(children.any(1), jnp.argmax(children, axis=1), -1)
        here = (step == at(tree.depths, node)[:, None]) & (node >= 0)[:, None]
        path = jnp.where(here, node[:, None], path)
    following = jnp.take_along_axis(choices, jnp.maximum(path, 0), axis=1)
    return Accepted(path, count, at(tree.ranks, deepest), following)
