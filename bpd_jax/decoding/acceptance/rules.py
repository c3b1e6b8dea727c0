"""Choice of the acceptance rule by `StepOptions.acceptance`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int, Num
from bpd_jax.decoding.acceptance.exact import Accepted, longest_match
from bpd_jax.decoding.acceptance.speculative import speculative_sampling
from bpd_jax.decoding.acceptance.typical import typical_match
from bpd_jax.decoding.options import SPECULATIVE, TYPICAL, StepOptions
from bpd_jax.decoding.sampling import ACCEPTANCE, choose, filtered, stream_keys
from bpd_jax.drafting.draft_tree import DraftTree
from bpd_jax.models.model import Model

# Logits to adjusted logits; the identity if options do not adjust them.
Adjust = Callable[[Float[Array, "B M V"]], Float[Array, "B M V"]]


def unchanged(logits: Array) -> Array:
    """The adjustment that changes nothing."""
    return logits


def next_tokens(
    model: Model,
    hidden: Num[Array, "B M D"],
    positions: Int[Array, "B M"],
    keys: Array,
    options: StepOptions,
    adjust: Adjust = unchanged,
) -> Int[Array, "B M"]:
    """The model's choice after every node; see `choose`."""
    if options.temperature == 0 and not options.adjusts:
        return model.greedy_tokens(hidden)
    logits = adjust(model.next_token_logits(hidden))
    if options.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return choose(logits, positions, keys, options)


def accept(
    model: Model,
    tree: DraftTree,
    hidden: Num[Array, "B M D"],
    positions: Int[Array, "B M"],
    next_token: Int[Array, " B"],
    keys: Array,
    options: StepOptions,
    max_depth: int,
    adjust: Adjust = unchanged,
) -> tuple[Accepted, Int[Array, "B M"]]:
    """Accepts a path of the tree by the rule of the options.

    Args:
      positions: index in the text of the token that follows each node.
      next_token: the certain token, which an accepted root must equal.

    Returns:
      The accepted path, and the model's choice after every node.
    """
    if options.acceptance not in (SPECULATIVE, TYPICAL):
        choices = next_tokens(model, hidden, positions, keys, options, adjust)
        return longest_match(tree, choices, next_token, max_depth), choices
    logits = filtered(adjust(model.next_token_logits(hidden)), options)
    choices = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Position 0 is that of the first root, at the end of the text.
    acceptance_keys = stream_keys(keys, positions[:, 0], ACCEPTANCE)
    if options.acceptance == SPECULATIVE:
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        accepted = speculative_sampling(tree, log_probs, acceptance_keys, max_depth)
        return accepted, choices
    accepted = typical_match(
        tree, logits, next_token, acceptance_keys, options, max_depth
    )
    return accepted, choices
