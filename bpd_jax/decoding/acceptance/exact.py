"""Exact acceptance: the longest path of the draft tree that the model agrees with."""

import jax.numpy as jnp

from bpd_jax.decoding.acceptance.path import Accepted, path_through
from bpd_jax.drafting.tree import DraftTree, take
from bpd_jax.typing import Array, Int


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
    wanted = jnp.where(
        tree.parents < 0, next_token[:, None], take(choices, tree.parents)
    )
    right = right_nodes(tree, tree.tokens == wanted, max_depth)
    # The deepest right node; argmax takes the first, that is the best ranked.
    deepest = jnp.argmax(jnp.where(right, tree.depths, -1), axis=1)
    return path_through(tree, deepest, choices, max_depth)


def right_nodes(
    tree: DraftTree, accepted: Int[Array, "B M"], max_depth: int
) -> Int[Array, "B M"]:
    """The nodes that are accepted together with all their ancestors."""
    accepted &= tree.valid
    right = accepted & (tree.parents < 0)
    for _ in range(max_depth - 1):
        right |= accepted & take(right, tree.parents) & (tree.parents >= 0)
    return right
