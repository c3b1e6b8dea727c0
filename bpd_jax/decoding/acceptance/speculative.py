"""Speculative sampling over draft trees: lossless at any temperature.

A draft token x that was drawn with probability q(x) is accepted with probability
min(1, p(x) / q(x)), where p is the model's distribution. If it is rejected, a token is
drawn from the residual max(p - q, 0), normalised (Leviathan et al. 2023). The children
of a node are tried one after the other, each against the residual of those before
(SpecInfer, Miao et al. 2024). Children are drawn without replacement, so a rejected
child is removed from q, which is normalised again. A child that was chosen
deterministically has q = 1: it is accepted with its probability in the residual, and
otherwise removed from p.

The token at a node has distribution p, whatever the children. With one child, x results
from acceptance with probability q(x) min(1, p(x) / q(x)) = min(p(x), q(x)), and from
the residual with probability p(x) - min(p(x), q(x)), as the sum of these differences is
the probability of a rejection. Further children do the same for the residual, which
does not depend on the rejected child.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.decoding.acceptance.exact import Accepted, path_through
from bpd_jax.drafting.draft_tree import DraftTree


class _Walk(NamedTuple):
    """The state of the walk of one row.

    Attributes:
      node: the last accepted node.
      tried: the last of its children that was tried, or `node` if none was.
      probs: residual of the model's distribution after `node`; sums to 1.
      source: unnormalised log-probabilities of the distribution from which its
        remaining children were drawn.
      attempts: number of children tried so far, for the random numbers.
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
    """Accepts a path of the tree and draws the next token.

    Args:
      tree: the drafts, with one root: the certain token, which is accepted.
      log_probs: log-probabilities of the model after every node, with temperature and
        filters.
      keys: `[B]`, a random key for each row and serial call.
    """
    drawn = tree.sources is not None
    if tree.sources is None:
        # The children were chosen deterministically.
        candidates = tree.tokens[..., None]
        source_log_probs = jnp.zeros(candidates.shape, jnp.float32)
    else:
        candidates, source_log_probs = tree.sources.tokens, tree.sources.log_probs

    def walk_row(
        tokens: Int[Array, " M"],
        parents: Int[Array, " M"],
        valid: Array,
        model: Float[Array, "M V"],
        candidates: Int[Array, "M W"],
        source_log_probs: Float[Array, "M W"],
        key: Array,
    ) -> tuple[Array, Array]:
        index = jnp.arange(tokens.shape[0])

        def waiting(walk: _Walk) -> Array:
            return (parents == walk.node) & valid & (index > walk.tried)

        def at(node: Array, attempts: Array) -> _Walk:
            source = source_log_probs[node]
            return _Walk(node, node, jnp.exp(model[node]), source, attempts)

        def attempt(walk: _Walk) -> _Walk:
            child = jnp.argmax(waiting(walk))
            token, attempts = tokens[child], walk.attempts + 1
            tokens_of_source = candidates[walk.node if drawn else child]
            is_token = tokens_of_source == token
            source = jax.nn.softmax(walk.source)
            probability = jnp.where(is_token, source, 0.0).sum()
            threshold = jax.random.uniform(jax.random.fold_in(key, walk.attempts))
            accepted = threshold * probability < walk.probs[token]
            rest = jnp.maximum(walk.probs.at[tokens_of_source].add(-source), 0.0)
            # The residual of equal distributions is 0; then only rounding can reject.
            rest = jnp.where(rest.sum() > 0, rest, walk.probs)
            rejected = _Walk(
                node=walk.node,
                tried=child,
                probs=rest / rest.sum(),
                source=jnp.where(is_token & drawn, -jnp.inf, walk.source),
                attempts=attempts,
            )
            return jax.tree.map(
                lambda a, b: jnp.where(accepted, a, b), at(child, attempts), rejected
            )

        walk = jax.lax.while_loop(
            lambda walk: waiting(walk).any(), attempt, at(jnp.int32(0), jnp.int32(0))
        )
        noise = jax.random.fold_in(key, walk.attempts)
        following = jax.random.categorical(noise, jnp.log(walk.probs))
        return walk.node, following.astype(jnp.int32)

    deepest, following = jax.vmap(walk_row)(
        tree.tokens,
        tree.parents,
        tree.valid,
        log_probs,
        candidates,
        source_log_probs,
        keys,
    )
    # Only the token after the last accepted node is used.
    choices = jnp.broadcast_to(following[:, None], tree.tokens.shape)
    return path_through(tree, deepest, choices, max_depth)
