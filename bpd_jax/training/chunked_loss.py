"""Cross-entropy of all heads, for one head and one chunk of the rows at a time.

The outer loop is over heads: the layer of a head runs once over whole rows, forward and
backward, and only its softmax is computed in chunks. The gradients of a chunk are
computed together with its logits, so no array of size V is stored or computed twice.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.models.block_heads import apply_head
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.partitioning import BATCH_SPEC
from bpd_jax.training.softmax_chunks import Chunk, LossLayout, LossSums, product
from bpd_jax.typing import Array, Bool, Float, Int, Params


class _Head(NamedTuple):
    """The arguments of one head; `weights` is None if it has no layer.

    Of a model without block heads they are the head's states themselves, `[B, T, D]`:
    those of one position of a block drafter.
    """

    weights: Params | Float[Array, "B T D"] | None
    targets: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    scale: Float[Array, ""]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def heads_loss(
    layout: LossLayout,
    heads: Params | Float[Array, "levels B T D"] | None,
    softmax: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "L B T"],
    valid: Bool[Array, "L B T"],
    scale: Float[Array, " L"],
) -> tuple[Float[Array, ""], Float[Array, " L"], Float[Array, " L"]]:
    """Σ_h scale_h · loss_h, where loss_h is the sum over valid positions.

    Only the first result is differentiable, with respect to `heads`, `softmax` and
    `hidden`. Gradients are accumulated over heads and chunks in float32.

    Args:
      layout: see `LossLayout`.
      heads: parameters of the heads' layers; None if they have none.
      softmax: softmax matrix of the model.
      hidden: final hidden states.
      targets: targets of each head.
      valid: mask of the valid targets.
      scale: weights of the heads.

    Returns:
      The weighted sum; the loss and the number of correct targets of each head.
    """
    sums = heads_sums(layout, heads, softmax, hidden, targets, valid, entropies=False)
    return jnp.dot(scale, sums.loss), sums.loss, sums.correct


def heads_sums(
    layout: LossLayout,
    heads: Params | Float[Array, "levels B T D"] | None,
    softmax: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "L B T"],
    valid: Bool[Array, "L B T"],
    *,
    entropies: bool = True,
) -> LossSums:
    """The sums of all heads, `[L]` each; the arguments are those of `heads_loss`."""
    weights = layout.matrix(softmax)

    def run(carry: None, head: _Head) -> tuple[None, tuple[LossSums, None]]:
        state = _head_state(layout.model, head.weights, hidden)

        def one(chunk: Chunk) -> LossSums:
            logits = layout.logits(chunk.state, weights)
            return layout.sums(logits, chunk, entropies=entropies)[0]

        def add(total: LossSums, chunk: Chunk) -> tuple[LossSums, None]:
            return _plus(total, layout.on_each(one, chunk)), None

        nothing = jnp.float32(0)
        zero = LossSums(nothing, nothing, nothing if entropies else None)
        chunks = layout.chunks(state, head.targets, head.valid)
        return carry, (jax.lax.scan(add, zero, chunks)[0], None)

    scale = jnp.zeros(len(targets))
    return _over_heads(run, None, _Head(heads, targets, valid, scale))[1]


def best_tokens(
    layout: LossLayout,
    heads: Params | Float[Array, "levels B T D"] | None,
    softmax: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
) -> Int[Array, "B T"]:
    """The most probable token of head 1 at every position, without gradient."""
    first = None
    if layout.model.heads is not None and layout.model.heads.first_has_ffn:
        assert heads is not None
        first = jax.tree.map(lambda x: x[0], heads)
    first, softmax, hidden = jax.lax.stop_gradient((first, softmax, hidden))
    weights = layout.matrix(softmax)
    state = _head_state(layout.model, first, hidden)

    def one(chunk: Chunk) -> Int[Array, " n"]:
        return jnp.argmax(layout.logits(chunk.state, weights), axis=-1)

    def best(carry: None, chunk: Chunk) -> tuple[None, Int[Array, "G n"]]:
        return carry, layout.on_each(one, chunk)

    nothing = jnp.zeros(hidden.shape[:2], jnp.int32)
    _, parts = jax.lax.scan(best, None, layout.chunks(state, nothing, nothing))
    return layout.joined(parts[..., None], *hidden.shape[:2])[..., 0]


def _forward(
    layout: LossLayout,
    heads: Params | None,
    softmax: Array,
    hidden: Array,
    targets: Array,
    valid: Array,
    scale: Array,
) -> tuple[tuple[Array, Array, Array], tuple[Params | None, Array, Array]]:
    """`heads_loss`, with its gradients as residuals."""
    weights = layout.matrix(softmax)

    def run(carry: Any, head: _Head) -> tuple[Any, tuple[LossSums, Params | None]]:
        by_softmax, by_hidden = carry
        state, pull = jax.vjp(
            functools.partial(_head_state, layout.model), head.weights, hidden
        )

        def one(chunk: Chunk) -> tuple[LossSums, Array, Array]:
            partial, error = layout.sums(layout.logits(chunk.state, weights), chunk)
            error = error.astype(weights.dtype)
            by_state = product("nV,VD->nD", error, weights)
            return partial, by_state, layout.by_matrix(error, chunk.state)

        def add(carry: Any, chunk: Chunk) -> tuple[Any, Array]:
            total, by_softmax = carry
            partial, by_state, by_weights = layout.on_each(one, chunk)
            # Scaled after the products, because bfloat16 would round the scale.
            by_softmax += head.scale * by_weights
            by_softmax = layout.pin(by_softmax, *spec)
            by_state = (head.scale * by_state).astype(state.dtype)
            return (_plus(total, partial), by_softmax), by_state

        zero = LossSums(jnp.float32(0), jnp.float32(0))
        chunks = layout.chunks(state, head.targets, head.valid)
        (partial, by_softmax), parts = jax.lax.scan(add, (zero, by_softmax), chunks)
        by_head, by_input = pull(layout.joined(parts, *hidden.shape[:2]))
        return (by_softmax, by_hidden + by_input), (partial, by_head)

    zeros = jnp.zeros((layout.groups, *weights.shape), jnp.float32)
    spec = (*BATCH_SPEC, "model")
    if layout.by_columns:
        zeros, spec = zeros.swapaxes(1, 2), (*BATCH_SPEC, None, "model")
    start = (
        layout.pin(zeros, *spec),
        layout.pin(jnp.zeros(hidden.shape, jnp.float32), *BATCH_SPEC),
    )
    (by_softmax, by_hidden), sums, by_heads = _over_heads(
        run, start, _Head(heads, targets, valid, scale)
    )
    by_softmax = by_softmax.sum(0)
    if layout.by_columns:
        by_softmax = by_softmax.T
    gradients = (
        by_heads,
        by_softmax[: len(softmax)].astype(softmax.dtype),
        by_hidden.astype(hidden.dtype),
    )
    return (jnp.dot(scale, sums.loss), sums.loss, sums.correct), gradients


def _backward(
    layout: LossLayout,
    gradients: tuple[Params | None, Array, Array],
    cotangents: tuple[Array, Array, Array],
) -> tuple[Any, ...]:
    del layout
    scaled = jax.tree.map(lambda x: (cotangents[0] * x).astype(x.dtype), gradients)
    return (*scaled, None, None, None)


heads_loss.defvjp(_forward, _backward)


def _over_heads(
    run: Callable[[Any, _Head], tuple[Any, tuple[LossSums, Any]]],
    carry: Any,
    heads: _Head,
) -> tuple[Any, LossSums, Any]:
    """`lax.scan` over the heads, preceded by head 1 if it has no layer of its own.

    Args:
      run: body of the scan.
      carry: initial carry.
      heads: arguments of all heads, stacked.

    Returns:
      The last carry; the sums, stacked to `[L]`; and the other results of `run`,
      stacked over the heads that have a layer.
    """
    weights, *per_head = heads
    layers = 0 if weights is None else len(jax.tree.leaves(weights)[0])
    plain = len(per_head[0]) - layers
    sums = []
    for index in range(plain):
        carry, (first, _) = run(carry, _Head(None, *(x[index] for x in per_head)))
        sums.append(jax.tree.map(lambda x: x[None], first))
    rest = None
    if weights is not None:
        # Faster than an unrolled loop on a CPU, and it needs a sixth of the memory.
        others = _Head(weights, *(x[plain:] for x in per_head))
        carry, (other_sums, rest) = jax.lax.scan(run, carry, others)
        sums.append(other_sums)
    return carry, jax.tree.map(lambda *x: jnp.concatenate(x), *sums), rest


def _head_state(
    model: BlockwiseConfig,
    weights: Params | Float[Array, "B T D"] | None,
    hidden: Float[Array, "B T D"],
) -> Float[Array, "B T D"]:
    """The input of a head's softmax."""
    if weights is None:
        return hidden
    if model.heads is None:
        return weights
    return apply_head(model.heads, weights, hidden, dtype=model.trunk.dtype)


def _plus(total: LossSums, added: LossSums) -> LossSums:
    """Adds the sums of all devices."""
    return jax.tree.map(lambda a, b: a + b.sum(0), total, added)
