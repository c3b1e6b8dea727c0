"""Verification: one forward pass of the model over all draft tokens.

`tree` merges drafts by common prefix into one row with tree attention. `batched` lays
every draft out as a chain beside the others; chains share the text's cache and do not
see each other. Both compute the same numbers for the same prefix, up to the order in
which sums are rounded.
"""

from typing import Any

import flax.struct
import jax.numpy as jnp

from bpd_jax.decoding.options import BATCHED
from bpd_jax.drafting.interface import Drafter
from bpd_jax.drafting.merging import merge_prefixes, unroll
from bpd_jax.drafting.tree import DraftTree, ancestor_mask, take
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.typing import Array, Float, Params


@flax.struct.dataclass
class Verified:
    """What the model says at every node.

    Attributes:
      tree: the drafts, merged if they were.
      hidden: final hidden states.
      new: keys and values.
      features: states of the layers that the drafter reads, or None.
    """

    tree: DraftTree
    hidden: Float[Array, "B M D"]
    new: KeyValues
    features: Float[Array, "B M F"] | None = None


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
    drafter: Drafter,
    verification: str,
) -> Verified:
    """Runs the model once over a tree of drafts.

    Args:
      model: functions of the model.
      params: its parameters.
      cache: the text before the drafts.
      tree: as proposed.
      drafter: what it came from, for the sizes of its trees.
      verification: `tree` or `batched`.
    """
    depth = drafter.max_depth
    batch = tree.tokens.shape[0]
    if tree.num_chains > 1:
        tree = merge_prefixes(tree, drafter.max_nodes, depth)
    if tree.num_chains == 1 or not _in_chains(drafter, verification):
        positions = cache.lengths[:, None] + tree.depths
        mask = ancestor_mask(tree.parents, depth)
        inputs = (tree.tokens, positions, mask, cache)
        run = forward(model, params, drafter.feature_layers, *inputs)
        return Verified(tree, *run)
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
    return Verified(
        tree=tree,
        hidden=take(hidden, chains.homes),
        new=KeyValues(
            keys=jnp.take_along_axis(new.keys, home, axis=2),
            values=jnp.take_along_axis(new.values, home, axis=2),
        ),
        features=None if features is None else take(features, chains.homes),
    )
