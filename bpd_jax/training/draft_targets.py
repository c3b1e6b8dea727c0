"""The targets of heads, block drafters and refiners in the draft vocabulary."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Int, Params
from bpd_jax.models.blockwise_config import BlockwiseConfig


class Targets(NamedTuple):
    """The targets of heads 2 … L at n positions.

    Attributes:
      places: indices in the draft vocabulary; arbitrary where `scored` is false.
      scored: whether there is a target in the draft vocabulary.
      valid: whether there is a target, in or outside the draft vocabulary.
    """

    places: Int[Array, "n levels"]
    scored: Bool[Array, "n levels"]
    valid: Bool[Array, "n levels"]


def draft_targets(
    tokens: Int[Array, "n levels"],
    valid: Bool[Array, "n levels"],
    vocabulary: Int[Array, " draft"] | None,
    vocab_size: int,
) -> Targets:
    """Looks up targets in the draft vocabulary.

    >>> tokens, valid = jnp.array([[7, 5], [5, 7]]), jnp.array([[1, 1], [1, 0]]) > 0
    >>> targets = draft_targets(tokens, valid, jnp.array([2, 7]), 9)
    >>> (targets.places * targets.scored).tolist()
    [[1, 0], [0, 0]]
    >>> targets.scored.astype(int).tolist(), targets.valid.astype(int).tolist()
    ([[1, 0], [0, 0]], [[1, 1], [1, 0]])

    Args:
      tokens: y_1 … y_{L-1} of every position.
      valid: whether they are in the text.
      vocabulary: ids of the draft vocabulary; None for all tokens.
      vocab_size: V.
    """
    if vocabulary is None:
        return Targets(tokens, valid, valid)
    place_of = jnp.full(vocab_size, -1).at[vocabulary].set(jnp.arange(len(vocabulary)))
    places = place_of[tokens]
    return Targets(jnp.maximum(places, 0), valid & (places >= 0), valid)


def targets_of(batch: Any, frozen: Params, model: BlockwiseConfig) -> Targets:
    """The targets of a `PositionBatch` or `BlockBatch`, whose anchors are positions.

    Args:
      batch: tokens y_0 … y_{L-1} and their mask, `[…, L]`.
      frozen: frozen arrays of the objective, with `vocabulary` if there is one.
      model: sizes of the frozen model.
    """
    tokens, valid = (
        jnp.asarray(x).reshape(-1, x.shape[-1])[:, 1:]
        for x in (batch.tokens, batch.valid)
    )
    vocab_size = model.trunk.vocab_size
    return draft_targets(tokens, valid, frozen.get("vocabulary"), vocab_size)
