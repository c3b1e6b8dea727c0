"""Draft trees, which methods propose and one forward pass verifies."""

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
    (`bpd_jax.drafting.merging`):

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
