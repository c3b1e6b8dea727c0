"""Verification: one forward pass of the model over all draft tokens.

`tree` merges drafts by common prefix into one row with tree attention. `batched` lays
every draft out as a chain beside the others; chains share the text's cache and do not
see each other. Both compute the same numbers for the same prefix, up to the order in
which sums are rounded.

The time of a pass grows with its tokens, on a CPU from the first ones on, and many
trees are rarely full. A pass over a tree is compiled for a few sizes
(`DraftTree.sizes`); the smallest that holds the valid nodes of all rows is run.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.decoding.acceptance.path import Accepted
from bpd_jax.decoding.acceptance.rules import accept
from bpd_jax.decoding.options import BATCHED, StepOptions
from bpd_jax.drafting.interface import Drafter
from bpd_jax.drafting.merging import merge_prefixes, unroll
from bpd_jax.drafting.tree import DraftTree, ancestor_mask, take
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.typing import Array, Float, Int, Params

# States, keys and values, and features of all nodes.
Pass = tuple[Float[Array, "B M D"], KeyValues, Float[Array, "B M F"] | None]


@flax.struct.dataclass
class Verified:
    """The outcome of a pass over drafts.

    Attributes:
      tree: the drafts, merged if they were.
      accepted: the path through the tree, L nodes, and how many of them are accepted.
      choices: the model's own choice after every node; any after invalid nodes.
      hidden: final hidden states along the path.
      new: keys and values along the path.
      features: states along the path of the layers that the drafter reads, or None.
    """

    tree: DraftTree
    accepted: Accepted
    choices: Int[Array, "B M"]
    hidden: Float[Array, "B L D"]
    new: KeyValues
    features: Float[Array, "B L F"] | None = None


def forward(
    model: ModelFunctions,
    params: Params,
    layers: tuple[int, ...],
    *inputs: Any,
) -> tuple[Float[Array, "B T D"], KeyValues, Float[Array, "B T F"] | None]:
    """Runs the model, and returns the states of some layers if there are any.

    Args:
      model: functions of the model.
      params: its parameters.
      layers: whose states are returned, concatenated; () for none.
      *inputs: tokens, positions, mask and perhaps a cache.
    """
    if layers:
        return model.forward_with_features(params, *inputs, layers=layers)
    return *model.forward(params, *inputs), None


def laid_out(drafter: Drafter, verification: str) -> int:
    """The most tokens that one forward pass checks in every row.

    Args:
      drafter: what proposes them.
      verification: `tree` or `batched`.
    """
    if _in_chains(drafter, verification):
        return drafter.max_drafts * drafter.max_depth
    return drafter.max_nodes


def _in_chains(drafter: Drafter, verification: str) -> bool:
    return verification == BATCHED and drafter.max_drafts > 1


def verify(
    model: ModelFunctions,
    params: Params,
    cache: KVCache,
    tree: DraftTree,
    next_token: Int[Array, " B"],
    keys: Array,
    drafter: Drafter,
    options: StepOptions,
) -> Verified:
    """Runs the model once over a tree of drafts, and accepts what it confirms.

    Args:
      model: functions of the model.
      params: its parameters.
      cache: the text before the drafts.
      tree: as proposed.
      next_token: the certain token, which a root must be.
      keys: one random key per row.
      drafter: what the tree came from, for the sizes of its trees.
      options: how drafts are verified and accepted.
    """
    depth = drafter.max_depth
    if tree.num_chains > 1:
        tree = merge_prefixes(tree, drafter.max_nodes, depth)
    in_chains = _in_chains(drafter, options.verification) and tree.num_chains != 1

    def verify_first(size: int, tree: DraftTree) -> Verified:
        part = tree.first(size)
        states = chain_states if in_chains else tree_states
        hidden, new, features = states(model, params, cache, part, drafter)
        accepted, choices = accept(
            model,
            params,
            part,
            hidden,
            cache.lengths[:, None] + part.depths + 1,
            next_token,
            keys,
            options,
            depth,
        )
        path = jnp.maximum(accepted.path, 0)
        index = path[None, :, :, None, None]
        return Verified(
            tree=tree,
            accepted=accepted,
            choices=jnp.pad(choices, ((0, 0), (0, tree.size - size))),
            hidden=take(hidden, path),
            new=jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=2), new),
            features=None if features is None else take(features, path),
        )

    sizes = (tree.size,) if in_chains else pass_sizes(tree)
    if len(sizes) == 1:
        return verify_first(tree.size, tree)
    last = jnp.max(jnp.where(tree.valid, jnp.arange(tree.size), 0))
    branches = [functools.partial(verify_first, size) for size in sizes]
    return jax.lax.switch(jnp.searchsorted(jnp.array(sizes), last + 1), branches, tree)


def pass_sizes(tree: DraftTree) -> tuple[int, ...]:
    """Numbers of nodes that the pass is compiled for, ascending; the last is M."""
    return (*(size for size in tree.sizes if size < tree.size), tree.size)


def tree_states(
    model: ModelFunctions,
    params: Params,
    cache: KVCache,
    tree: DraftTree,
    drafter: Drafter,
) -> Pass:
    """Final hidden states, keys and values, and features of the nodes of a tree.

    Args:
      model: functions of the model.
      params: its parameters.
      cache: the text before the drafts.
      tree: the drafts, merged by prefix.
      drafter: for its sizes and the layers whose states it reads.
    """
    positions = cache.lengths[:, None] + tree.depths
    mask = ancestor_mask(tree.parents, drafter.max_depth)
    inputs = (tree.tokens, positions, mask, cache)
    return forward(model, params, drafter.feature_layers, *inputs)


def chain_states(
    model: ModelFunctions,
    params: Params,
    cache: KVCache,
    tree: DraftTree,
    drafter: Drafter,
) -> Pass:
    """`tree_states`, computed in chains side by side, one for each leaf."""
    depth, batch = drafter.max_depth, tree.tokens.shape[0]
    chains = unroll(tree, drafter.max_drafts, depth)
    # What stands past the end of a chain sees itself, so that no row is empty.
    real = chains.nodes >= 0
    causal = jnp.tril(jnp.ones((depth, depth), bool))
    mask = causal & (real[:, :, None] | jnp.eye(depth, dtype=bool))
    depths = jnp.broadcast_to(jnp.arange(depth), chains.nodes.shape)
    places = chains.nodes.reshape(batch, -1)
    hidden, new, features = forward(
        model,
        params,
        drafter.feature_layers,
        take(tree.tokens, places),
        cache.lengths[:, None] + depths.reshape(batch, -1),
        mask,
        cache,
    )
    home = chains.homes[None, :, :, None, None]
    return (
        take(hidden, chains.homes),
        jax.tree.map(lambda x: jnp.take_along_axis(x, home, axis=2), new),
        None if features is None else take(features, chains.homes),
    )
