"""Speculative sampling over draft trees: lossless at any temperature.

A draft token x that was drawn with probability q(x), where the model has p(x), is kept
with probability min(1, p(x) / q(x)); otherwise what is left to draw is the residual
max(p - q, 0), normalised (Leviathan et al. 2023). A node with several children tries
them one after the other, each against the residual of those before (SpecInfer, Miao et
al. 2024). Children are drawn without replacement, so after a rejected child q is what
is left of it without that child. A child that was chosen without chance has q = 1: it
is kept with what probability is left of it, and otherwise taken out of p.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.decoding.acceptance.path import Accepted, path_through
from bpd_jax.drafting.tree import DraftTree
from bpd_jax.typing import Array, Float, Int

# Probabilities below this are rounding errors of a residual.
_NOTHING = 1e-30


class _Walk(NamedTuple):
    """Where one row stands.

    Attributes:
      node: the last accepted node.
      tried: the last child that was tried, or `node` if none was.
      probs: what is left of the model's distribution after `node`.
      source: what is left of the distribution that its children were drawn from.
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
    next_token: Int[Array, " B"],
    keys: Array,
    max_depth: int,
) -> Accepted:
    """Walks down the tree, accepting or replacing.

    Args:
      tree: the drafts. A row's root is the certain token: it is accepted.
      log_probs: of the model after every node, temperature and filters applied.
      next_token: the certain token.
      keys: one per row and serial call.
      max_depth: nodes on the longest path.
    """
    del next_token
    sources = tree.sources
    nothing = jnp.zeros((*tree.tokens.shape, 1), jnp.float32)
    source_tokens = jnp.zeros_like(nothing, jnp.int32)
    source_probs = nothing
    if sources is not None:
        source_tokens, source_probs = sources.tokens, sources.probs
    drawn = sources is not None

    def walk_row(
        tokens: Int[Array, " M"],
        parents: Int[Array, " M"],
        valid: Array,
        model: Float[Array, "M V"],
        candidates: Int[Array, "M W"],
        odds: Float[Array, "M W"],
        key: Array,
    ) -> tuple[Array, Array]:
        index = jnp.arange(tokens.shape[0])

        def next_child(walk: _Walk) -> tuple[Array, Array]:
            waiting = (parents == walk.node) & valid & (index > walk.tried)
            return jnp.argmax(waiting), waiting.any()

        def at(node: Array, attempts: Array) -> _Walk:
            return _Walk(node, node, jnp.exp(model[node]), odds[node], attempts)

        def attempt(walk: _Walk) -> _Walk:
            child, _ = next_child(walk)
            token, names = tokens[child], candidates[walk.node]
            total = jnp.maximum(walk.probs.sum(), _NOTHING)
            if drawn:
                left = walk.source / jnp.maximum(walk.source.sum(), _NOTHING)
            else:
                # The child is all that its source could give.
                left, names = jnp.ones(1), token[None]
            chance = left[jnp.argmax(names == token)]
            threshold = jax.random.uniform(jax.random.fold_in(key, walk.attempts))
            kept = threshold * chance * total < walk.probs[token]
            probs = walk.probs / total
            rest = jnp.maximum(probs.at[names].add(-left), 0.0)
            # With equal distributions nothing but rounding can reject.
            kept |= rest.sum() <= 0
            rejected = _Walk(
                node=walk.node,
                tried=child,
                probs=rest,
                source=jnp.where(names == token, 0.0, walk.source),
                attempts=walk.attempts + 1,
            )
            accepted = at(child, walk.attempts + 1)
            return jax.tree.map(lambda a, b: jnp.where(kept, a, b), accepted, rejected)

        walk = jax.lax.while_loop(
            lambda walk: next_child(walk)[1], attempt, at(jnp.int32(0), jnp.int32(0))
        )
        final = jax.random.fold_in(key, walk.attempts)
        logits = jnp.log(jnp.maximum(walk.probs, _NOTHING))
        logits = jnp.where(walk.probs > 0, logits, -jnp.inf)
        return walk.node, jax.random.categorical(final, logits).astype(jnp.int32)

    deepest, following = jax.vmap(walk_row)(
        tree.tokens,
        tree.parents,
        tree.valid,
        log_probs,
        source_tokens,
        source_probs,
        keys,
    )
    # Nothing but the token after the last accepted node is ever used.
    choices = jnp.broadcast_to(following[:, None], tree.tokens.shape)
    return path_through(tree, deepest, choices, max_depth)
