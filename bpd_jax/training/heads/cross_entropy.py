"""Cross-entropy with a large softmax, whose gradient is computed in the forward pass.

The backward pass would need an array of size positions × vocabulary. The gradients are
computed while the logits of a chunk exist, so that no such array is stored and nothing
is computed twice.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.typing import Array, Bool, Float, Int

# Logits of a chunk: 32 MB in float32. Smaller chunks spend more time on accumulating
# gradients.
_CHUNK_LOGITS = 2**23

# Computes new weights from the probabilities of the targets and the weights; all `[n]`.
Weigh = Callable[[Array, Array], Array]


class Teacher(NamedTuple):
    """The model's own distribution at the predicted positions, as soft targets.

    Attributes:
      states: states of the model after the tokens before the target.
      share: weight of the model's distribution in the targets, 0 to 1.
    """

    states: Float[Array, "n D"]
    share: Float[Array, ""]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def softmax_loss(
    state: Float[Array, "n R"],
    matrix: Float[Array, "draft R"],
    places: Int[Array, " n"],
    weights: Float[Array, " n"],
    teacher: Teacher | None = None,
    trained_columns: int = 0,
    weigh: Weigh | None = None,
) -> tuple[Float[Array, ""], Float[Array, " n"], Bool[Array, " n"]]:
    """Sum of weights · −log softmax(state · matrixᵀ)[places].

    Only the sum is differentiable, with respect to `state` and, if it is trained,
    `matrix`. Products have the matrix's precision, with sums in float32.

    Args:
      state: inputs of the softmax.
      matrix: rows of the softmax.
      places: rows of the targets; arbitrary where the weight is 0.
      weights: weights of the positions.
      teacher: soft targets of share μ: the target distribution is 1 - μ times the token
        at `places` plus μ times q = softmax(teacher.states · matrix[:, :D]ᵀ), and the
        loss is the cross-entropy with it.
      trained_columns: number of the last columns of the matrix that have a gradient.
      weigh: computes the weights from the probabilities of the targets and `weights`;
        no gradient flows through it.

    Returns:
      The sum, the losses without weights, and whether each target is ranked first.
    """
    return _softmax_forward(
        state, matrix, places, weights, teacher, trained_columns, weigh
    )[0]


def _softmax_forward(
    state: Array,
    matrix: Array,
    places: Array,
    weights: Array,
    teacher: Teacher | None,
    trained_columns: int,
    weigh: Weigh | None,
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array | None]]:
    """`softmax_loss`, with its gradients as residuals."""
    rounded = state.astype(matrix.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = product("nD,VD->nV", rounded, matrix)
    target_logits = jnp.take_along_axis(logits, places[:, None], 1)[:, 0]
    top = logits.max(1)
    exponentials = jnp.exp(logits - top[:, None])
    total = exponentials.sum(1)
    losses = jnp.log(total) + top - target_logits
    hits = target_logits == top
    if weigh is not None:
        weights = weigh(jnp.exp(-losses), weights)
    # d loss / d state = Σ_v p_v matrix_v − matrix_place, likewise for the matrix.
    scale = weights / total
    hard_share = jnp.float32(1)
    if teacher is not None:
        shared = matrix[:, : teacher.states.shape[1]]
        model_logits = product("nD,VD->nV", teacher.states.astype(matrix.dtype), shared)
        soft_targets = jax.nn.softmax(model_logits)
        hard_share = 1 - teacher.share
        # −Σ_v q_v log p_v instead of −log p of the target.
        soft_losses = jnp.log(total) + top - jnp.sum(soft_targets * logits, axis=1)
        losses = hard_share * losses + teacher.share * soft_losses
        exponentials -= teacher.share * total[:, None] * soft_targets
    rounded_exponentials = exponentials.astype(matrix.dtype)
    mean = product("nV,VD->nD", rounded_exponentials, matrix)
    by_state = scale[:, None] * mean - hard_share * weights[:, None] * matrix[places]
    by_matrix = None
    if trained_columns:
        part = state[:, -trained_columns:]
        scaled = (scale[:, None] * part).astype(matrix.dtype)
        by_matrix = product("nV,nD->VD", rounded_exponentials, scaled)
        by_matrix = by_matrix.at[places].add(-(hard_share * weights[:, None] * part))
        by_matrix = by_matrix.astype(matrix.dtype)
    # Losses with a weight of 0 are arbitrary but finite.
    result = jnp.sum(weights * losses), losses, hits
    return result, (by_state.astype(state.dtype), by_matrix)


def _softmax_backward(
    trained_columns: int,
    weigh: Weigh | None,
    gradients: tuple[Array, Array | None],
    cotangents: tuple[Array, Array, Array],
) -> tuple[Any, ...]:
    del trained_columns, weigh
    by_state, by_matrix = jax.tree.map(
        lambda x: (cotangents[0] * x).astype(x.dtype), gradients
    )
    if by_matrix is not None:
        fixed = by_state.shape[1] - by_matrix.shape[1]
        by_matrix = jnp.pad(by_matrix, ((0, 0), (fixed, 0)))
    return by_state, by_matrix, None, None, None


softmax_loss.defvjp(_softmax_forward, _softmax_backward)


def levels_loss(
    inputs: Float[Array, "n levels R"],
    matrix: Float[Array, "draft R"],
    places: Int[Array, "n levels"],
    weights: Float[Array, "n levels"],
    *,
    later: Float[Array, "n levels D"] | None = None,
    share: float = 0.0,
    trained_columns: int = 0,
    weigh: Weigh | None = None,
) -> tuple[Float[Array, ""], Float[Array, "n levels"], Bool[Array, "n levels"]]:
    """`softmax_loss` of several levels, in chunks of positions.

    Args:
      inputs, matrix, places, weights: see `softmax_loss`.
      later: states of the model after the tokens before each target, for soft targets.
      share: weight of the soft targets; see `Teacher`.
      trained_columns, weigh: see `softmax_loss`; a chunk has all levels of a position.

    Returns:
      The sum, the losses without weights, and whether each target is ranked first.
    """
    count, levels = places.shape
    chunk = max(1, chunk_size(count * levels, len(matrix)) // levels)
    chunk = next(size for size in range(chunk, 0, -1) if count % size == 0)

    def split(x: Array) -> Array:
        return x.reshape(count // chunk, chunk * levels, *x.shape[2:])

    def chunk_loss(part: Any) -> tuple[Array, Array, Array]:
        state, place, weight, after = part
        teacher = None if after is None else Teacher(after, jnp.float32(share))
        return softmax_loss(
            state, matrix, place, weight, teacher, trained_columns, weigh
        )

    parts = jax.tree.map(split, (inputs, places, weights, later))
    totals, losses, hits = jax.lax.map(chunk_loss, parts)
    return totals.sum(), losses.reshape(count, levels), hits.reshape(count, levels)


def levels_ranks(
    inputs: Float[Array, "n levels R"],
    matrix: Float[Array, "draft R"],
    places: Int[Array, "n levels"],
) -> tuple[Float[Array, "n levels"], Int[Array, "n levels"]]:
    """−log p and rank, from 0, of each target, computed in chunks of positions."""
    count, levels = places.shape
    chunk = chunk_size(count, matrix.shape[0] * levels)

    def chunk_ranks(part: tuple[Array, Array]) -> tuple[Array, Array]:
        state, place = part
        logits = jnp.einsum(
            "nlD,VD->nlV",
            state.astype(matrix.dtype),
            matrix,
            preferred_element_type=jnp.float32,
        )
        target_logits = jnp.take_along_axis(logits, place[..., None], -1)
        losses = jax.nn.logsumexp(logits, -1) - target_logits[..., 0]
        return losses, jnp.sum(logits > target_logits, -1)

    parts = (
        inputs.reshape(count // chunk, chunk, levels, -1),
        places.reshape(count // chunk, chunk, levels),
    )
    losses, ranks = jax.lax.map(chunk_ranks, parts)
    return losses.reshape(count, levels), ranks.reshape(count, levels)


def by_level(
    function: Callable[..., Any],
    matrices: Float[Array, "#levels draft R"],
    arrays: tuple[Array, ...],
) -> Any:
    """Calls `function(inputs, matrix, …)` for all levels, which may share a softmax.

    Args:
      function: called once if the levels share a matrix, else once for each level.
      matrices: softmax matrices of the levels.
      arrays: inputs and other arrays, `[n, levels, …]` each.

    Returns:
      The result of `function`; results of several calls are concatenated along the
      levels, scalars are added.
    """
    inputs, *rest = arrays
    if len(matrices) == 1:
        return function(inputs, matrices[0], *rest)
    parts = [
        function(inputs[:, j : j + 1], matrix, *(x[:, j : j + 1] for x in rest))
        for j, matrix in enumerate(matrices)
    ]
    return jax.tree.map(
        lambda *x: jnp.concatenate(x, axis=1) if x[0].ndim else sum(x), *parts
    )


def chunk_size(positions: int, vocabulary: int) -> int:
    """Positions of a chunk: the largest divisor of `positions` with 32 MB of logits."""
    most = max(1, _CHUNK_LOGITS // vocabulary)
    return max(d for d in range(1, min(most, positions) + 1) if positions % d == 0)
