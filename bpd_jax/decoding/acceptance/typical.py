"""Medusa's typical acceptance. LOSSY: it changes the distribution of the texts."""

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.decoding.acceptance.exact import Accepted, accepted_nodes, path_through
from bpd_jax.decoding.options import StepOptions
from bpd_jax.drafting.draft_tree import DraftTree, take
from bpd_jax.models.model import entropy


def typical_match(
    tree: DraftTree,
    logits: Float[Array, "B M V"],
    next_token: Int[Array, " B"],
    keys: Array,
    options: StepOptions,
    max_depth: int,
) -> Accepted:
    """Accepts the longest path of typical tokens.

    A token is typical if p(token) > min(ε, δ · exp(-H(p))), where p is the model's
    distribution after its parent (Cai et al. 2024, section 2.3.1): the higher the
    entropy, the lower the threshold. The token after the path is sampled from the
    model.

    Args:
      logits: logits of the model after every node, divided by the temperature and
        filtered.
      next_token: the certain token, which an accepted root must equal.
    """
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    threshold = jnp.minimum(
        jnp.log(options.typical_epsilon),
        jnp.log(options.typical_delta) - entropy(log_probs),
    )
    before = take(log_probs, tree.parents)
    score = jnp.take_along_axis(before, tree.tokens[..., None], axis=2)[..., 0]
    typical = score > take(threshold, tree.parents)
    certain = tree.tokens == next_token[:, None]
    matches = jnp.where(tree.parents < 0, certain, typical)
    accepted = accepted_nodes(tree, matches, max_depth)
    deepest = jnp.argmax(jnp.where(accepted, tree.depths, -1), axis=1)
    after = take(logits, deepest[:, None])[:, 0]
    drawn = jax.vmap(jax.random.categorical)(keys, after).astype(jnp.int32)
    # Only the token after the last accepted node is used.
    choices = jnp.broadcast_to(drawn[:, None], tree.tokens.shape)
    return path_through(tree, deepest, choices, max_depth)
