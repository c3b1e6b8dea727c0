"""From the states of a block drafter to candidates: softmax and confidences."""

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import AnyArray, Array, Float, Int, Params
from bpd_jax.models.quantized import QuantizedMatrix, TiledMatrix, rows_of

FROZEN = ("softmax", "vocabulary")

# Probabilities are at least this far from 0 and 1, so that logarithms are finite.
_MARGIN = 1e-6


def draft_tokens(params: Params, indices: Int[Array, "..."]) -> Int[Array, "..."]:
    """Token ids of indices into the draft vocabulary."""
    return params["vocabulary"][indices] if "vocabulary" in params else indices


def with_softmax(
    params: Params,
    softmax: Float[AnyArray, "V D"] | QuantizedMatrix | TiledMatrix,
    vocabulary: AnyArray | None,
) -> Params:
    """Adds the frozen softmax of the target to the trained parameters.

    Without a draft vocabulary, `[V']` int32, it is shared.
    """
    if vocabulary is None:
        return {**params, "softmax": softmax}
    return {
        **params,
        "softmax": rows_of(softmax, vocabulary),
        "vocabulary": jnp.asarray(vocabulary, jnp.int32),
    }


def with_confidence(
    log_probs: Float[Array, "... W"], logits: Float[Array, "..."]
) -> Float[Array, "... W"]:
    """Log-probabilities in which the first candidate has the predicted confidence.

    A confidence head predicts whether the first candidate is accepted. Its prediction c
    replaces the probability p of that candidate, and the other tokens share 1 - c
    instead of 1 - p. Trees are therefore deep where confidence is high, and wide or cut
    (`min_prob`) where it is low. c is raised where the order of the candidates would
    change otherwise.

    >>> log_probs = jnp.log(jnp.array([0.5, 0.3, 0.1]))
    >>> confident = with_confidence(log_probs, jnp.log(0.8 / 0.2))
    >>> [f"{probability:.2f}" for probability in jnp.exp(confident)]
    ['0.80', '0.12', '0.04']

    `log_probs` are of candidates, best first, normalised over the draft vocabulary.
    """
    first = jnp.minimum(jnp.exp(log_probs[..., 0]), 1 - _MARGIN)
    second = jnp.exp(log_probs[..., 1]) if log_probs.shape[-1] > 1 else 0.0
    lowest = second / (1 - first + second)
    confidence = jnp.clip(jax.nn.sigmoid(logits), lowest, 1 - _MARGIN)
    confidence = jnp.maximum(confidence, _MARGIN)
    shared = jnp.log1p(-confidence) - jnp.log1p(-first)
    best = jnp.log(confidence)[..., None]
    # Where c was raised, rounding may leave the second candidate above the first.
    others = jnp.minimum(log_probs[..., 1:] + shared[..., None], best)
    return jnp.concatenate([best, others], axis=-1)
