"""The loss of heads on cached states: one head and some positions at a time.

Gradients of a head are found while its logits are there. So no array of the size
positions × vocabulary lives longer than one chunk of positions, none is kept for going
backward, and nothing is computed twice.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.models.config import BlockHeadsConfig
from bpd_jax.models.heads import apply_head, layer_shapes
from bpd_jax.typing import Array, Bool, Float, Int, Params

# Logits of a chunk: 32 MB in float32. Smaller ones cost time for adding up gradients.
_CHUNK_LOGITS = 2**23


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


class Teacher(NamedTuple):
    """What the model itself expects where a head guesses.

    Attributes:
      states: of the model after the tokens before the target.
      share: of the targets that is the model's distribution, 0 to 1.
    """

    states: Float[Array, "n D"]
    share: Float[Array, ""]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def softmax_loss(
    state: Float[Array, "n D"],
    matrix: Float[Array, "draft D"],
    places: Int[Array, " n"],
    scored: Bool[Array, " n"],
    teacher: Teacher | None,
    trains_matrix: bool,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Summed −log softmax(state · matrixᵀ)[places], and the number ranked first.

    Only the first result has a gradient, with respect to `state` and, if it is trained,
    to `matrix`. Products are of the matrix's precision with sums in float32.

    With a teacher, of share μ, the target is 1 - μ of the token at `places` and μ of
    q = softmax(teacher.states · matrixᵀ), and the loss is the cross-entropy with that.
    """
    return _softmax_forward(state, matrix, places, scored, teacher, trains_matrix)[0]


def _softmax_forward(
    state: Array,
    matrix: Array,
    places: Array,
    scored: Array,
    teacher: Teacher | None,
    trains_matrix: bool,
) -> tuple[tuple[Array, Array], tuple[Array, Array | None]]:
    """`softmax_loss`, and its gradients as residuals."""
    rounded = state.astype(matrix.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = product("nD,VD->nV", rounded, matrix)
    found = jnp.take_along_axis(logits, places[:, None], 1)[:, 0]
    top = logits.max(1)
    weights = jnp.exp(logits - top[:, None])
    total = weights.sum(1)
    losses = jnp.log(total) + top - found
    correct = jnp.sum((found == top) & scored, dtype=jnp.float32)
    # d loss / d state = Σ_v p_v matrix_v − matrix_place, likewise for the matrix.
    scale = scored / total
    own = jnp.float32(1)
    if teacher is not None:
        assert not trains_matrix
        theirs = product("nD,VD->nV", teacher.states.astype(matrix.dtype), matrix)
        likely = jax.nn.softmax(theirs)
        own = 1 - teacher.share
        # −Σ_v q_v log p_v, in place of that of the token at the place.
        soft = jnp.log(total) + top - jnp.sum(likely * logits, axis=1)
        losses = own * losses + teacher.share * soft
        weights -= teacher.share * total[:, None] * likely
    rounded_weights = weights.astype(matrix.dtype)
    expected = product("nV,VD->nD", rounded_weights, matrix)
    by_state = scale[:, None] * expected - own * scored[:, None] * matrix[places]
    by_matrix = None
    if trains_matrix:
        scaled = (scale[:, None] * state).astype(matrix.dtype)
        by_matrix = product("nV,nD->VD", rounded_weights, scaled)
        by_matrix = by_matrix.at[places].add(-(scored[:, None] * state))
        by_matrix = by_matrix.astype(matrix.dtype)
    result = jnp.sum(losses, where=scored), correct
    return result, (by_state.astype(state.dtype), by_matrix)


def _softmax_backward(
    trains_matrix: bool,
    gradients: tuple[Array, Array | None],
    cotangents: tuple[Array, Array],
) -> tuple[Any, ...]:
    del trains_matrix
    by_state, by_matrix = jax.tree.map(
        lambda x: (cotangents[0] * x).astype(x.dtype), gradients
    )
    return by_state, by_matrix, None, None, None


softmax_loss.defvjp(_softmax_forward, _softmax_backward)


def chunk_size(positions: int, vocabulary: int) -> int:
    """Positions of a chunk: the largest divisor whose logits stay in 32 MB."""
    most = max(1, _CHUNK_LOGITS // vocabulary)
    return max(d for d in range(1, min(most, positions) + 1) if positions % d == 0)


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
        return softmax_loss(found, softmax, places, scored, teacher, own)

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
