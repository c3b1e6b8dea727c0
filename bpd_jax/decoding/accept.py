"""Acceptance: the longest path of the draft tree that the model agrees with."""

import flax.struct
import jax.numpy as jnp

from bpd_jax.drafting.tree import DraftTree
from bpd_jax.typing import Array, Int


@flax.struct.dataclass
class Accepted:
    """The winning draft of every row.

    Attributes:
      path: its nodes from the root, the rejected rest included, -1 past its end.
      count: how many of them are right, at least 1.
      rank: its rank among the drafts.
    """

    path: Int[Array, "B L"]
    count: Int[Array, " B"]
    rank: Int[Array, " B"]


def longest_match(
    tree: DraftTree,
    choices: Int[Array, "B M"],
    next_token: Int[Array, " B"],
    max_depth: int,
) -> Accepted:
    """Walks down from the root while a child is the model's choice at its parent.

    Worked example: the text goes on `a b c e`, the drafts are `a b x` and `a b c`.
    Both roots are right, both `b` are (the choice at `a` is `b`), `x` is not (the
    choice at `b` is `c`). The second draft wins with 3 tokens; the model's choice at
    `c`, namely `e`, becomes the next call's certain token.

    Args:
      tree: the drafts.
      choices: the model's next token at every node.
      next_token: the certain token, which a root must be.
      max_depth: nodes on the longest path.
    """
    parents = jnp.maximum(tree.parents, 0)
    wanted = jnp.where(
        tree.parents < 0,
        next_token[:, None],
        jnp.take_along_axis(choices, parents, axis=1),
    )
    matches = (tree.tokens == wanted) & tree.valid
    right = matches & (tree.parents < 0)
    for _ in range(max_depth - 1):
        right |= matches & jnp.take_along_axis(right, parents, axis=1)
    # The deepest right node; argmax takes the first, that is the best ranked.
    deepest = jnp.argmax(jnp.where(right, tree.depths, -1), axis=1)

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
    return Accepted(path, count, at(tree.ranks, deepest))
