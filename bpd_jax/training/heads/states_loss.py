"""The loss of heads on cached states, one head and one chunk of positions at a time.

The gradients of a chunk are computed together with its logits. So arrays of size
positions × vocabulary exist for one chunk of positions only, none is stored for a
backward pass, and nothing is computed twice.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.models.block_heads import apply_head, layer_shapes
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.training.frozen import LevelSums
from bpd_jax.training.heads.cross_entropy import Teacher, chunk_size, softmax_loss
from bpd_jax.typing import Array, Bool, Float, Int, Params


class Targets(NamedTuple):
    """The targets of heads 2 … L at n positions.

    Attributes:
      places: indices in the draft vocabulary; arbitrary where `scored` is false.
      scored: whether there is a target in the draft vocabulary.
      valid: whether there is a target, in or outside the draft vocabulary.
    """

    places: Int[Array, "levels n"]
    scored: Bool[Array, "levels n"]
    valid: Bool[Array, "levels n"]


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
    valid = jnp.transpose(valid)
    places, known = draft_places(jnp.transpose(tokens), vocabulary, vocab_size)
    return Targets(places, valid & known, valid)


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


def draft_places(
    tokens: Int[Array, "..."], vocabulary: Int[Array, " draft"] | None, vocab_size: int
) -> tuple[Int[Array, "..."], Bool[Array, "..."]]:
    """Indices of tokens in the draft vocabulary (0 if absent), and their presence."""
    if vocabulary is None:
        return tokens, jnp.ones_like(tokens, bool)
    place_of = jnp.full(vocab_size, -1).at[vocabulary].set(jnp.arange(len(vocabulary)))
    places = place_of[tokens]
    return jnp.maximum(places, 0), places >= 0


def loss_and_gradients(
    config: BlockHeadsConfig,
    trained: Params,
    matrix: Float[Array, "draft D"] | None,
    states: Float[Array, "n D"],
    targets: Targets,
    lambdas: tuple[float, ...],
    *,
    side: Float[Array, "n C"] | None = None,
    later: Float[Array, "levels n D"] | None = None,
    soft_targets: float = 0.0,
    products: str = "float32",
    chunk: int | None = None,
) -> tuple[Float[Array, ""], LevelSums, Params, Float[Array, "n C"] | None]:
    """Σ_h λ_h loss_h, where loss_h is the mean of −log p_h over scored positions.

    Args:
      config: sizes of the heads.
      trained: trained parameters of the heads.
      matrix: the softmax that the heads share; None if each has one, in `trained`.
      states: final hidden states of the frozen model.
      targets: see `Targets`.
      lambdas: λ of heads 2 … L.
      side: additional input of conditioned heads; see `models.block_heads.condition`.
      later: states from which the model itself predicts the targets, for soft targets.
      soft_targets: weight of the model's own distribution in the targets, 0 to 1.
      products: precision of products.
      chunk: positions of a chunk; None for `chunk_size`.

    Returns:
      The loss, the sums for the metrics, the gradients of the layers and softmaxes of
      the heads, structured like `trained`, and the gradient of `side`.
    """
    own_softmax = matrix is None
    rows = trained["softmax"].shape[1] if matrix is None else matrix.shape[0]
    chunk = chunk_size(len(states), rows) if chunk is None else chunk
    shared = None if matrix is None else matrix.astype(products)
    names = layer_shapes(config, states.shape[-1])

    def split(x: Array | None) -> Array | None:
        return None if x is None else x.reshape(-1, chunk, *x.shape[1:])

    def chunk_loss(
        weights: Params,
        softmax: Array,
        extra: Array | None,
        state: Array,
        places: Array,
        scored: Array,
        after: Array | None,
    ) -> tuple[Array, Array]:
        output = apply_head(config, weights, state, extra, dtype=products)
        teacher = None if after is None else Teacher(after, jnp.float32(soft_targets))
        counts = scored.astype(jnp.float32)
        columns = output.shape[1] if own_softmax else 0
        total, _, hits = softmax_loss(output, softmax, places, counts, teacher, columns)
        return total, jnp.sum(hits & scored, dtype=jnp.float32)

    arguments = (0, 1) if own_softmax else (0,) if side is None else (0, 2)
    differentiate = jax.value_and_grad(chunk_loss, arguments, has_aux=True)
    state_chunks = split(states.astype(products))
    side_chunks = split(None if side is None else side.astype(products))

    def add_level(carry: Any, level: Any) -> tuple[Any, Any]:
        total, by_side = carry
        weights, softmax, target, scale, after = level
        softmax = shared if softmax is None else softmax.astype(products)

        def add_chunk(sums: Any, part: Any) -> tuple[Any, Any]:
            (loss, correct), gradients = differentiate(weights, softmax, *part)
            by_extra = None
            if side is not None:
                *gradients, by_extra = gradients
            added = (loss, correct, tuple(gradients))
            return jax.tree.map(jnp.add, sums, added), by_extra

        # Sums over chunks are in float32, whatever the precision of products.
        shapes = (weights, softmax) if own_softmax else (weights,)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
        start = (jnp.float32(0), jnp.float32(0), zeros)
        parts = (
            side_chunks,
            state_chunks,
            split(target.places),
            split(target.scored),
            split(after),
        )
        (loss, correct, gradients), by_extra = jax.lax.scan(add_chunk, start, parts)
        gradients = jax.tree.map(lambda x: scale * x, gradients)
        if by_extra is not None:
            by_side += scale * by_extra.reshape(by_side.shape).astype(jnp.float32)
        return (total + scale * loss, by_side), (loss, correct, gradients)

    scored = targets.scored.sum(1, dtype=jnp.float32)
    valid = targets.valid.sum(1, dtype=jnp.float32)
    scale = jnp.asarray(lambdas, jnp.float32) / jnp.maximum(scored, 1)
    layers = {name: trained[name] for name in names}
    softmaxes = trained["softmax"] if own_softmax else None
    every_level = (layers, softmaxes, targets, scale, later)
    zero = None if side is None else jnp.zeros(side.shape, jnp.float32)
    (total, by_side), (losses, correct, by_level) = jax.lax.scan(
        add_level, (jnp.float32(0), zero), every_level
    )
    gradients = dict(by_level[0])
    if own_softmax:
        gradients["softmax"] = by_level[1]
    return total, LevelSums(losses, correct, scored, valid), gradients, by_side
