"""Targets and cross-entropy of heads, drafters and refiners of a frozen model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.partitioning import row_parts
from bpd_jax.training.cross_entropy import (
    Head,
    LossInputs,
    SoftmaxLoss,
    Weigh,
    product,
    weighted_losses,
)


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

    Without a draft vocabulary all tokens are in it.
    """
    if vocabulary is None:
        return Targets(tokens, valid, valid)
    place_of = jnp.full(vocab_size, -1).at[vocabulary].set(jnp.arange(len(vocabulary)))
    places = place_of[tokens]
    return Targets(jnp.maximum(places, 0), valid & (places >= 0), valid)


def targets_of(batch: Any, frozen: Params, model: BlockwiseConfig) -> Targets:
    """The targets of a `PositionBatch` or `BlockBatch`, whose anchors are positions."""
    tokens, valid = (
        jnp.asarray(x).reshape(-1, x.shape[-1])[:, 1:]
        for x in (batch.tokens, batch.valid)
    )
    vocab_size = model.trunk.vocab_size
    return draft_targets(tokens, valid, frozen.get("vocabulary"), vocab_size)


# Logits of a chunk: 32 MB in float32. Smaller chunks spend more time on accumulating
# gradients.
_CHUNK_LOGITS = 2**23


def levels_loss(
    inputs: Float[Array, "n levels R"],
    matrix: Float[Array, "draft R"],
    targets: Int[Array, "n levels"],
    weights: Float[Array, "n levels"],
    teacher: Float[Array, "n levels D"] | None = None,
    *,
    trained_columns: int = 0,
    teacher_share: float = 0.0,
    weigh: Weigh | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], Float[Array, "n levels"], Bool[Array, "n levels"]]:
    """Σ weights · −log softmax(inputs · matrixᵀ)[targets], in chunks of positions.

    Only the sum is differentiable, with respect to `inputs` and, if it is trained,
    `matrix`. Products have the matrix's precision, with sums in float32. Returns also
    the losses without weights, and whether each target is ranked first.

    Args:
      inputs, matrix: their products are the logits.
      targets, weights, teacher: see `LossInputs`.
      trained_columns, teacher_share, weigh: see `SoftmaxLoss`; a chunk has all levels
        of a position.
      mesh: devices that split the positions evenly; None for one device.
    """
    (count, levels), rows = targets.shape, row_parts(mesh)
    # The positions of a device are a row: every chunk has some of each.
    chunk = levels * chunk_size(count // rows, len(matrix) * levels)
    loss = SoftmaxLoss(
        len(matrix),
        matrix.dtype.name,
        chunk,
        mesh,
        trained_columns=trained_columns,
        teacher_share=teacher_share,
        weigh=weigh,
    )
    positions = jax.tree.map(
        lambda x: x.reshape(rows, -1, *x.shape[2:]),
        LossInputs(inputs, targets, weights, teacher),
    )
    # One head, whose positions are those of all levels.
    targets, weights, teacher = jax.tree.map(lambda x: x[None], positions[1:])
    head = Head(None, targets, weights, teacher, jnp.ones(1))
    total, losses = weighted_losses(loss, _as_it_is, matrix, positions.state, head)
    return (
        total,
        losses.loss.reshape(count, levels),
        losses.correct.reshape(count, levels),
    )


def _as_it_is(layer: None, inputs: Array) -> Array:
    return inputs


def levels_ranks(
    inputs: Float[Array, "n levels R"],
    matrix: Float[Array, "draft R"],
    targets: Int[Array, "n levels"],
) -> tuple[Float[Array, "n levels"], Int[Array, "n levels"]]:
    """−log p and rank, from 0, of each target, computed in chunks of positions."""
    count, levels = targets.shape
    chunk = chunk_size(count, len(matrix) * levels)

    def chunk_ranks(part: tuple[Array, Array]) -> tuple[Array, Array]:
        state, target = part
        logits = product("nlD,VD->nlV", state.astype(matrix.dtype), matrix)
        target_logits = jnp.take_along_axis(logits, target[..., None], -1)
        losses = jax.nn.logsumexp(logits, -1) - target_logits[..., 0]
        return losses, jnp.sum(logits > target_logits, -1)

    parts = (
        inputs.reshape(count // chunk, chunk, levels, -1),
        targets.reshape(count // chunk, chunk, levels),
    )
    losses, ranks = jax.lax.map(chunk_ranks, parts)
    return losses.reshape(count, levels), ranks.reshape(count, levels)


def by_level(
    function: Callable[..., Any],
    matrices: Float[Array, "#levels draft R"],
    arrays: tuple[Array | None, ...],
) -> Any:
    """Calls `function(inputs, matrix, …)` for all levels, which may share a softmax.

    `function` is called once if the levels share a matrix, else once for each.
    `arrays`, the inputs first, are `[n, levels, …]` each, or None. Results of several
    calls are concatenated along the levels; scalars are added.
    """
    inputs, *rest = arrays
    if len(matrices) == 1:
        return function(inputs, matrices[0], *rest)

    def call(level: tuple[Array, tuple[Array | None, ...]]) -> Any:
        matrix, level_arrays = level
        first, *others = jax.tree.map(lambda x: x[:, None], level_arrays)
        return function(first, matrix, *others)

    # A loop, so that the gradients of all matrices are stacked rather than added.
    by_level = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays)
    results = jax.lax.map(call, (matrices, by_level))
    return jax.tree.map(
        lambda x: x.sum() if x.ndim == 1 else jnp.moveaxis(x[:, :, 0], 0, 1), results
    )


def chunk_size(positions: int, vocabulary: int) -> int:
    """Positions of a chunk: the largest divisor of `positions` with 32 MB of logits."""
    most = max(1, _CHUNK_LOGITS // vocabulary)
    return max(d for d in range(1, min(most, positions) + 1) if positions % d == 0)
