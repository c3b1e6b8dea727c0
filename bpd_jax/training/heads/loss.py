"""The loss of heads on cached states: one head and some positions at a time.

Gradients of a head are found while its logits are there. So no array of the size
positions × vocabulary lives longer than one chunk of positions, none is kept for going
backward, and nothing is computed twice.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.models.config import BlockHeadsConfig
from bpd_jax.models.heads import apply_head, layer_shapes
from bpd_jax.training.heads.cross_entropy import Teacher, chunk_size, softmax_loss
from bpd_jax.typing import Array, Bool, Float, Int, Params


class Targets(NamedTuple):
    """What heads 2 … L should guess at n positions.

    Attributes:
      places: in the draft vocabulary; any where `scored` is false.
      scored: whether there is a target in the draft vocabulary.
      valid: whether there is a target, in or outside the draft vocabulary.
    """

    places: Int[Array, "levels n"]
    scored: Bool[Array, "levels n"]
    valid: Bool[Array, "levels n"]


class LevelSums(NamedTuple):
    """Sums over positions for heads 2 … L; they add up over batches.

    Attributes:
      loss: −log p of the targets in the draft vocabulary.
      correct: targets that the head ranks first.
      scored: targets in the draft vocabulary.
      valid: all targets; those outside the draft vocabulary are misses.
    """

    loss: Float[Array, " levels"]
    correct: Float[Array, " levels"]
    scored: Float[Array, " levels"]
    valid: Float[Array, " levels"]


def draft_targets(
    tokens: Int[Array, "n levels"],
    valid: Bool[Array, "n levels"],
    vocabulary: Int[Array, " draft"] | None,
    vocab_size: int,
) -> Targets:
    """Finds targets in the draft vocabulary.

    >>> tokens, valid = jnp.array([[7, 5], [5, 7]]), jnp.array([[1, 1], [1, 0]]) > 0
    >>> found = draft_targets(tokens, valid, jnp.array([2, 7]), 9)
    >>> (found.places * found.scored).tolist(), found.scored.astype(int).tolist()
    ([[1, 0], [0, 0]], [[1, 0], [0, 0]])
    >>> found.valid.astype(int).tolist()
    [[1, 1], [1, 0]]

    Args:
      tokens: y_1 … y_{L-1} of every position.
      valid: whether they lie in the text.
      vocabulary: ids of the draft vocabulary; None for all tokens.
      vocab_size: V.
    """
    valid = jnp.transpose(valid)
    places, known = draft_places(jnp.transpose(tokens), vocabulary, vocab_size)
    return Targets(places, valid & known, valid)


def draft_places(
    tokens: Int[Array, "..."], vocabulary: Int[Array, " draft"] | None, vocab_size: int
) -> tuple[Int[Array, "..."], Bool[Array, "..."]]:
    """Where tokens stand in the draft vocabulary, and whether they do; 0 if not."""
    if vocabulary is None:
        return tokens, jnp.ones_like(tokens, bool)
    places = jnp.full(vocab_size, -1).at[vocabulary].set(jnp.arange(len(vocabulary)))
    found = places[tokens]
    return jnp.maximum(found, 0), found >= 0


def loss_and_gradients(
    config: BlockHeadsConfig,
    trained: Params,
    matrix: Float[Array, "draft D"] | None,
    states: Float[Array, "n D"],
    targets: Targets,
    lambdas: tuple[float, ...],
    *,
    later: Float[Array, "levels n D"] | None = None,
    soft_targets: float = 0.0,
    products: str = "float32",
    chunk: int | None = None,
) -> tuple[Float[Array, ""], LevelSums, Params]:
    """Σ_h λ_h loss_h, where loss_h is the mean of −log p_h over scored positions.

    Args:
      config: of the heads.
      trained: their trained parameters.
      matrix: the softmax that they share; None if each has one, in `trained`.
      states: of the frozen model.
      targets: see `Targets`.
      lambdas: λ of heads 2 … L.
      later: states with which the model itself predicts the targets; for soft ones.
      soft_targets: share of the targets that is the model's own distribution.
      products: precision of products.
      chunk: positions whose logits exist at a time; None for `chunk_size`.

    Returns:
      The loss, the sums that metrics are made of, and gradients like `trained`.
    """
    own = matrix is None
    rows = trained["softmax"].shape[1] if matrix is None else matrix.shape[0]
    chunk = chunk_size(len(states), rows) if chunk is None else chunk
    shared = None if matrix is None else matrix.astype(products)
    names = layer_shapes(config, states.shape[-1])
    chunks = states.astype(products).reshape(-1, chunk, states.shape[-1])

    def chunk_loss(
        weights: Params,
        softmax: Array,
        state: Array,
        places: Array,
        scored: Array,
        after: Array | None,
    ) -> tuple[Array, Array]:
        found = apply_head(config, weights, state, dtype=products)
        teacher = None if after is None else Teacher(after, jnp.float32(soft_targets))
        weights = scored.astype(jnp.float32)
        total, _, hits = softmax_loss(found, softmax, places, weights, teacher, own)
        return total, jnp.sum(hits & scored, dtype=jnp.float32)

    differentiate = jax.value_and_grad(
        chunk_loss, (0, 1) if own else (0,), has_aux=True
    )

    def add_level(carry: Array, level: Any) -> tuple[Array, Any]:
        weights, softmax, target, scale, after = level
        softmax = shared if softmax is None else softmax.astype(products)

        def add_chunk(sums: Any, part: Any) -> tuple[Any, None]:
            (loss, correct), found = differentiate(weights, softmax, *part)
            return jax.tree.map(jnp.add, sums, (loss, correct, found)), None

        # Chunks add up in float32 whatever the precision of products.
        shapes = (weights, softmax) if own else (weights,)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
        start = (jnp.float32(0), jnp.float32(0), zeros)
        parts = (
            chunks,
            target.places.reshape(-1, chunk),
            target.scored.reshape(-1, chunk),
            None if after is None else after.reshape(chunks.shape),
        )
        (loss, correct, found), _ = jax.lax.scan(add_chunk, start, parts)
        found = jax.tree.map(lambda x: scale * x, found)
        return carry + scale * loss, (loss, correct, found)

    scored = targets.scored.sum(1, dtype=jnp.float32)
    valid = targets.valid.sum(1, dtype=jnp.float32)
    scale = jnp.asarray(lambdas, jnp.float32) / jnp.maximum(scored, 1)
    layers = {name: trained[name] for name in names}
    softmaxes = trained["softmax"] if own else None
    every_level = (layers, softmaxes, targets, scale, later)
    total, (losses, correct, found) = jax.lax.scan(
        add_level, jnp.float32(0), every_level
    )
    gradients = dict(found[0])
    if own:
        gradients["softmax"] = found[1]
    return total, LevelSums(losses, correct, scored, valid), gradients
