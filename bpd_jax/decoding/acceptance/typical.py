"""Medusa's typical acceptance. LOSSY: the text is not distributed as the model's."""

import jax
import jax.numpy as jnp

from bpd_jax.decoding.acceptance.exact import right_nodes
from bpd_jax.decoding.acceptance.path import Accepted, path_through
from bpd_jax.decoding.options import StepOptions
from bpd_jax.drafting.tree import DraftTree, take
from bpd_jax.models.functions import entropy
from bpd_jax.typing import Array, Float, Int


def typical_match(
    tree: DraftTree,
    logits: Float[Array, "B M V"],
    next_token: Int[Array, " B"],
    keys: Array,
    options: StepOptions,
    max_depth: int,
) -> Accepted:
    """The longest path of tokens that the model holds for typical.

    A token is kept if p(token) > min(ε, δ · exp(-H(p))), with p what the model says
    after its parent (Cai et al. 2024, section 2.3.1): where the model is unsure, less
    probable tokens will do. The token after the path is drawn from the model.

    Args:
      tree: the drafts.
      logits: of the model after every node, divided by the temperature and filtered.
      next_token: the certain token, which a root must be.
      keys: one per row.
      options: ε and δ.
      max_depth: nodes on the longest path.
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
    right = right_nodes(tree, jnp.where(tree.parents < 0, certain, typical), max_depth)
    deepest = jnp.argmax(jnp.where(right, tree.depths, -1), axis=1)
    after = take(logits, deepest[:, None])[:, 0]
    drawn = jax.vmap(jax.random.categorical)(keys, after).astype(jnp.int32)
    # Nothing but the token after the last accepted node is ever used.
    choices = jnp.broadcast_to(drawn[:, None], tree.tokens.shape)
    return path_through(tree, deepest, choices, max_depth)
