"""The best tokens of distributions, and their entropies."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.models import device_ops

Perturbation = Callable[..., Array]
"""Changes log-probabilities before candidates are chosen: a function of `[B, P, V]`,
the number of candidates, and perhaps `tokens`, the ids `[V]` of a draft vocabulary."""


def top_candidates(
    logits: Float[Array, "... V"], width: int, perturb: Perturbation | None = None
) -> tuple[Int[Array, "... W"], Float[Array, "... W"], Float[Array, "..."]]:
    """The `width` best tokens, their log-probabilities, and the entropy in nats.

    With `perturb`, tokens and log-probabilities are of what it returns, normalised.
    """
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    ranked = log_probs
    if perturb is not None:
        ranked = jax.nn.log_softmax(perturb(log_probs, width))
    # Without the barriers, XLA would merge these slices with those of a caller that
    # takes the first columns only, would not recognise the top-k on a CPU, and would
    # sort the whole vocabulary. (A single barrier on both results crashes XLA on a
    # mesh.)
    scores, tokens = map(
        jax.lax.optimization_barrier, device_ops.current().largest(ranked, width)
    )
    return tokens.astype(jnp.int32), scores, entropy(log_probs)


def entropy(log_probs: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Entropy of distributions, in nats."""
    # 0 · log 0 is 0.
    terms = jnp.where(jnp.isneginf(log_probs), 0.0, jnp.exp(log_probs) * log_probs)
    return -terms.sum(-1)
