"""Verification: one forward pass of the model over all draft tokens.

`tree` merges drafts by common prefix into one tree per row, with tree attention.
`batched` computes every draft as a separate chain; the chains share the cache of the
text and do not attend to each other. Both compute the same numbers for the same prefix,
up to rounding.

The time of a pass grows with its number of tokens, especially on a CPU, and trees with
a threshold are rarely full. A pass over such a tree is compiled for a few sizes
(`Drafter.pass_sizes`), and the smallest one that holds all valid nodes is used.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int, Num
from bpd_jax.decoding.acceptance import Accepted, accept, unchanged
from bpd_jax.decoding.options import BATCHED, StepOptions
from bpd_jax.decoding.sampling import adjusted, texts_of_nodes
from bpd_jax.drafting.draft_tree import (
    DraftTree,
    ancestor_mask,
    merge_prefixes,
    take,
    unroll,
)
from bpd_jax.drafting.interface import Drafter
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.decoded_model import DecodedModel
from bpd_jax.models.products import in_order

# States, keys and values, and features of all nodes.
# Hidden states of a recording are the places of what it recorded, as integers.
Pass = tuple[Num[Array, "B M D"], KeyValues, Float[Array, "B M F"]]


@flax.struct.dataclass
class Verified:
    """The outcome of a pass over drafts.

    Attributes:
      tree: the verified drafts, with common prefixes merged.
      accepted: the path through the tree, L nodes, and the number of accepted ones.
      choices: the model's choice after every node; arbitrary after invalid nodes.
      hidden: final hidden states along the path.
      new: keys and values along the path.
      features: outputs of `Drafter.feature_layers` along the path.
    """

    tree: DraftTree
    accepted: Accepted
    choices: Int[Array, "B M"]
    hidden: Float[Array, "B L D"]
    new: KeyValues
    features: Float[Array, "B L F"]


def pass_sizes(drafter: Drafter, verification: str) -> tuple[int, ...]:
    """Numbers of draft tokens for which a pass is compiled, per row, ascending."""
    if _in_chains(drafter, verification):
        return (drafter.max_drafts * drafter.max_depth,)
    return drafter.pass_sizes


def _in_chains(drafter: Drafter, verification: str) -> bool:
    return verification == BATCHED and drafter.max_drafts > 1


def verify(
    model: DecodedModel,
    cache: KVCache,
    tree: DraftTree,
    next_token: Int[Array, " B"],
    keys: Array,
    drafter: Drafter,
    options: StepOptions,
    tokens: Int[Array, "B S"],
    starts: Int[Array, " B"],
) -> Verified:
    """Runs the model once over a tree of drafts and accepts a path of it.

    Args:
      cache: the text before the drafts.
      next_token: the certain token, which an accepted root must equal.
      drafter: the drafting method, which bounds the size of the tree.
      tokens: prompt and text so far, with room for the drafts.
    """
    depth = drafter.max_depth
    if tree.num_chains > 1:
        tree = merge_prefixes(tree, drafter.max_nodes, depth)
    in_chains = _in_chains(drafter, options.verification) and tree.num_chains != 1

    def verify_first(size: int, tree: DraftTree) -> Verified:
        part = tree.first(size)
        positions = cache.lengths[:, None] + part.depths
        if in_chains:
            hidden, new, features = chain_states(model, cache, part, drafter)
        else:
            mask = ancestor_mask(part.parents, depth)
            hidden, new, features = model.forward(
                part.tokens, positions, mask, cache, layers=drafter.feature_layers
            )

        def adjust(logits: Array) -> Array:
            texts = texts_of_nodes(tokens, cache.lengths, part, depth)
            return adjusted(logits, *texts, starts, options)

        accepted, choices = accept(
            model,
            part,
            hidden,
            positions + 1,
            next_token,
            keys,
            options,
            depth,
            adjust if options.adjusts else unchanged,
        )
        path = jnp.maximum(accepted.path, 0)
        index = path[None, :, :, None, None]

        # Without the mode, XLA would ask of every number whether it is within bounds.
        def select(x: Array) -> Array:
            return in_order(jnp.take_along_axis(x, index, axis=2, mode="clip"))

        return Verified(
            tree=tree,
            accepted=accepted,
            choices=jnp.pad(choices, ((0, 0), (0, tree.size - size))),
            hidden=take(hidden, path),
            new=jax.tree.map(select, new),
            features=take(features, path),
        )

    sizes = (tree.size,) if in_chains else tree_sizes(drafter, tree)
    if len(sizes) == 1:
        return verify_first(tree.size, tree)
    last = jnp.max(jnp.where(tree.valid, jnp.arange(tree.size), 0))
    branches = [functools.partial(verify_first, size) for size in sizes]
    return jax.lax.switch(jnp.searchsorted(jnp.array(sizes), last + 1), branches, tree)


def tree_sizes(drafter: Drafter, tree: DraftTree) -> tuple[int, ...]:
    """Sizes of the passes for a tree; the last is that of the tree."""
    return (*(size for size in drafter.pass_sizes if size < tree.size), tree.size)


def chain_states(
    model: DecodedModel,
    cache: KVCache,
    tree: DraftTree,
    drafter: Drafter,
) -> Pass:
    """Outputs for the nodes of a tree, computed in separate chains, one for each leaf.

    `cache` is the text before the drafts.
    """
    depth, batch = drafter.max_depth, tree.tokens.shape[0]
    nodes, places = unroll(tree, drafter.max_drafts, depth)
    # Padding after the end of a chain attends to itself, so that no row is empty.
    is_node = nodes >= 0
    causal = jnp.tril(jnp.ones((depth, depth), bool))
    mask = causal & (is_node[:, :, None] | jnp.eye(depth, dtype=bool))
    depths = jnp.broadcast_to(jnp.arange(depth), nodes.shape)
    hidden, new, features = model.forward(
        take(tree.tokens, nodes.reshape(batch, -1)),
        cache.lengths[:, None] + depths.reshape(batch, -1),
        mask,
        cache,
        layers=drafter.feature_layers,
    )
    index = places[None, :, :, None, None]
    return (
        take(hidden, places),
        jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=2), new),
        take(features, places),
    )
