"""Speculative sampling over draft trees: lossless at any temperature.

A draft token x that was drawn with probability q(x), where the model has p(x), is kept
with probability min(1, p(x) / q(x)); otherwise what is left to draw is the residual
max(p - q, 0), normalised (Leviathan et al. 2023). A node with several children tries
them one after the other, each against the residual of those before (SpecInfer, Miao et
al. 2024). Children are drawn without replacement, so after a rejected child q is what
is left of it without that child. A child that was chosen without chance has q = 1: it
is kept with what probability is left of it, and otherwise taken out of p.

Whatever was tried before, the token that comes out of a node has probability p. With
one child, x comes out with q(x) min(1, p(x) / q(x)) = min(p(x), q(x)) as the child,
and with p(x) - min(p(x), q(x)) out of the residual: its sum is just the probability of
a rejection. Further children do the same for the residual, which does not depend on
which child was rejected.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.decoding.acceptance.path import Accepted, path_through
from bpd_jax.drafting.tree import DraftTree
from bpd_jax.typing import Array, Float, Int


class _Walk(NamedTuple):
    """Where one row stands.

    Attributes:
      node: the last accepted node.
      tried: the last of its children that was tried, or `node` if none was.
      probs: what is left of the model's distribution after `node`; sums to 1.
      source: logarithms of what is left of the distribution that its children were
        drawn from; its sum is of no account.
      attempts: children tried so far, for the noise.
    """

    node: Int[Array, ""]
    tried: Int[Array, ""]
    probs: Float[Array, " V"]
    source: Float[Array, " W"]
    attempts: Int[Array, ""]


def speculative_sampling(
    tree: DraftTree,
    log_probs: Float[Array, "B M V"],
    keys: Array,
    max_depth: int,
) -> Accepted:
    """Walks down the tree, accepting or replacing.

    Args:
      tree: the drafts, with one root: the certain token, which is accepted.
      log_probs: of the model after every node, temperature and filters applied.
      keys: one per row and serial call.
      max_depth: nodes on the longest path.
    """
    drawn = tree.sources is not None
    if tree.sources is None:
        # Nothing else could have been proposed in a child's place.
        names = tree.tokens[..., None]
        odds = jnp.zeros(names.shape, jnp.float32)
    else:
        names, odds = tree.sources.tokens, tree.sources.log_probs

    def walk_row(
        tokens: Int[Array, " M"],
        parents: Int[Array, " M"],
        valid: Array,
        model: Float[Array, "M V"],
        names: Int[Array, "M W"],
        odds: Float[Array, "M W"],
        key: Array,
    ) -> tuple[Array, Array]:
        index = jnp.arange(tokens.shape[0])

        def waiting(walk: _Walk) -> Array:
            return (parents == walk.node) & valid & (index > walk.tried)

        def at(node: Array, attempts: Array) -> _Walk:
            return _Walk(node, node, jnp.exp(model[node]), odds[node], attempts)

        def attempt(walk: _Walk) -> _Walk:
            child = jnp.argmax(waiting(walk))
            token, attempts = tokens[child], walk.attempts + 1
            candidates = names[walk.node if drawn else child]
            is_token = candidates == token
            source = jax.nn.softmax(walk.source)
            chance = jnp.where(is_token, source, 0.0).sum()
            threshold = jax.random.uniform(jax.random.fold_in(key, walk.attempts))
            kept = threshold * chance < walk.probs[token]
            rest = jnp.maximum(walk.probs.at[candidates].add(-source), 0.0)
            # Distributions that are equal leave nothing: only rounding rejects then.
            rest = jnp.where(rest.sum() > 0, rest, walk.probs)
            rejected = _Walk(
                node=walk.node,
                tried=child,
                probs=rest / rest.sum(),
                source=jnp.where(is_token & drawn, -jnp.inf, walk.source),
                attempts=attempts,
            )
            return jax.tree.map(
                lambda a, b: jnp.where(kept, a, b), at(child, attempts), rejected
            )

        walk = jax.lax.while_loop(
            lambda walk: waiting(walk).any(), attempt, at(jnp.int32(0), jnp.int32(0))
        )
        noise = jax.random.fold_in(key, walk.attempts)
        following = jax.random.categorical(noise, jnp.log(walk.probs))
        return walk.node, following.astype(jnp.int32)

    deepest, following = jax.vmap(walk_row)(
        tree.tokens, tree.parents, tree.valid, log_probs, names, odds, keys
    )
    # Nothing but the token after the last accepted node is ever used.
    choices = jnp.broadcast_to(following[:, None], tree.tokens.shape)
    return path_through(tree, deepest, choices, max_depth)
