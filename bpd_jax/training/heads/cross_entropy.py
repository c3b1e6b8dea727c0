"""Cross-entropy with a softmax over many tokens, whose gradient is found going forward.

What would be kept for going backward, an array of the size positions × vocabulary, is
used while it is there: nothing of that size is kept, and nothing is computed twice.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.typing import Array, Bool, Float, Int

# Logits of a chunk: 32 MB in float32. Smaller ones cost time for adding up gradients.
_CHUNK_LOGITS = 2**23

# From probabilities of the targets and weights, new weights; all `[n]`.
Weigh = Callable[[Array, Array], Array]


class Teacher(NamedTuple):
    """What the model itself expects at the positions that are guessed.

    Attributes:
      states: of the model after the tokens before the target.
      share: of the targets that is the model's distribution, 0 to 1.
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
    trains_matrix: bool = False,
    weigh: Weigh | None = None,
) -> tuple[Float[Array, ""], Float[Array, " n"], Bool[Array, " n"]]:
    """Sum of weights · −log softmax(state · matrixᵀ)[places].

    Only the sum has a gradient, with respect to `state` and, if it is trained, to
    `matrix`. Products are of the matrix's precision with sums in float32.

    Args:
      state: inputs of the softmax.
      matrix: rows of the softmax.
      places: rows of the targets; any where the weight is 0.
      weights: of the positions.
      teacher: of share μ: the target is 1 - μ of the token at `places` and μ of
        q = softmax(teacher.states · matrix[:, :D]ᵀ), and the loss is the cross-entropy
        with that.
      trains_matrix: whether the matrix has a gradient.
      weigh: computes the weights from the probabilities of the targets and `weights`;
        no gradient flows through it.

    Returns:
      The sum, the losses without weights, and whether each target is ranked first.
    """
    return _softmax_forward(
        state, matrix, places, weights, teacher, trains_matrix, weigh
    )[0]


def _softmax_forward(
    state: Array,
    matrix: Array,
    places: Array,
    weights: Array,
    teacher: Teacher | None,
    trains_matrix: bool,
    weigh: Weigh | None,
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array | None]]:
    """`softmax_loss`, and its gradients as residuals."""
    rounded = state.astype(matrix.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = product("nD,VD->nV", rounded, matrix)
    found = jnp.take_along_axis(logits, places[:, None], 1)[:, 0]
    top = logits.max(1)
    likely = jnp.exp(logits - top[:, None])
    total = likely.sum(1)
    losses = jnp.log(total) + top - found
    hits = found == top
    if weigh is not None:
        weights = weigh(jnp.exp(-losses), weights)
    # d loss / d state = Σ_v p_v matrix_v − matrix_place, likewise for the matrix.
    scale = weights / total
    own = jnp.float32(1)
    if teacher is not None:
        shared = matrix[:, : teacher.states.shape[1]]
        theirs = product("nD,VD->nV", teacher.states.astype(matrix.dtype), shared)
        expected = jax.nn.softmax(theirs)
        own = 1 - teacher.share
        # −Σ_v q_v log p_v, in place of that of the token at the place.
        soft = jnp.log(total) + top - jnp.sum(expected * logits, axis=1)
        losses = own * losses + teacher.share * soft
        likely -= teacher.share * total[:, None] * expected
    rounded_likely = likely.astype(matrix.dtype)
    mean = product("nV,VD->nD", rounded_likely, matrix)
    by_state = scale[:, None] * mean - own * weights[:, None] * matrix[places]
    by_matrix = None
    if trains_matrix:
        scaled = (scale[:, None] * state).astype(matrix.dtype)
        by_matrix = product("nV,nD->VD", rounded_likely, scaled)
        by_matrix = by_matrix.at[places].add(-(own * weights[:, None] * state))
        by_matrix = by_matrix.astype(matrix.dtype)
    # Where the weight is 0 the loss may be anything, but is a number.
    result = jnp.sum(weights * losses), losses, hits
    return result, (by_state.astype(state.dtype), by_matrix)


def _softmax_backward(
    trains_matrix: bool,
    weigh: Weigh | None,
    gradients: tuple[Array, Array | None],
    cotangents: tuple[Array, Array, Array],
) -> tuple[Any, ...]:
    del trains_matrix, weigh
    by_state, by_matrix = jax.tree.map(
        lambda x: (cotangents[0] * x).astype(x.dtype), gradients
    )
    return by_state, by_matrix, None, None, None


softmax_loss.defvjp(_softmax_forward, _softmax_backward)


def chunk_size(positions: int, vocabulary: int) -> int:
    """Positions of a chunk: the largest divisor whose logits stay in 32 MB."""
    most = max(1, _CHUNK_LOGITS // vocabulary)
    return max(d for d in range(1, min(most, positions) + 1) if positions % d == 0)
