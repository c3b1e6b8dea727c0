"""Cross-entropy of all heads: one head's logits of one chunk of the rows at a time.

Heads are the outer loop: a head's own layer runs once over whole rows, forward and
backward, and only its softmax is cut into chunks. Gradients are found while the logits
are there, so nothing of size V is kept or computed twice.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.heads import apply_head
from bpd_jax.models.partitioning import BATCH_SPEC
from bpd_jax.training.softmax_chunks import Chunk, HeadsLoss, LossSums, product
from bpd_jax.typing import Array, Bool, Float, Int, Params


class _Head(NamedTuple):
    """One head's share of the arguments; `weights` may be None.

    Of a model without block heads they are the head's states themselves, `[B, T, D]`:
    those of one position of a block drafter.
    """

    weights: Params | Float[Array, "B T D"] | None
    targets: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    scale: Float[Array, ""]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def heads_loss(
    how: HeadsLoss,
    heads: Params | Float[Array, "levels B T D"] | None,
    softmax: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "L B T"],
    valid: Bool[Array, "L B T"],
    scale: Float[Array, " L"],
) -> tuple[Float[Array, ""], Float[Array, " L"], Float[Array, " L"]]:
    """Σ_h scale_h · loss_h of summed losses; then loss and correct targets per head.

    Only the first result has a gradient, with respect to `heads`, `softmax` and
    `hidden`. Differentiation adds up over heads and chunks in float32.
    """
    sums = heads_sums(how, heads, softmax, hidden, targets, valid, entropies=False)
    return jnp.dot(scale, sums.loss), sums.loss, sums.correct


def heads_sums(
    how: HeadsLoss,
    heads: Params | Float[Array, "levels B T D"] | None,
    softmax: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "L B T"],
    valid: Bool[Array, "L B T"],
    *,
    entropies: bool = True,
) -> LossSums:
    """The sums of every head, `[L]` each."""
    weights = how.matrix(softmax)

    def run(carry: None, head: _Head) -> tuple[None, tuple[LossSums, None]]:
        state = _head_state(how.model, head.weights, hidden)

        def one(chunk: Chunk) -> LossSums:
            logits = how.logits(chunk.state, weights)
            return how.sums(logits, chunk, entropies=entropies)[0]

        def add(total: LossSums, chunk: Chunk) -> tuple[LossSums, None]:
            return _plus(total, how.on_each(one, chunk)), None

        nothing = jnp.float32(0)
        zero = LossSums(nothing, nothing, nothing if entropies else None)
        chunks = how.chunks(state, head.targets, head.valid)
        return carry, (jax.lax.scan(add, zero, chunks)[0], None)

    scale = jnp.zeros(len(targets))
    return _over_heads(run, None, _Head(heads, targets, valid, scale))[1]


def best_tokens(
    how: HeadsLoss,
    heads: Params | Float[Array, "levels B T D"] | None,
    softmax: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
) -> Int[Array, "B T"]:
    """The token that head 1 holds for likeliest at every position; no gradient."""
    first = None
    if how.model.heads is not None and how.model.heads.first_has_ffn:
        assert heads is not None
        first = jax.tree.map(lambda x: x[0], heads)
    first, softmax, hidden = jax.lax.stop_gradient((first, softmax, hidden))
    weights = how.matrix(softmax)
    state = _head_state(how.model, first, hidden)

    def one(chunk: Chunk) -> Int[Array, " n"]:
        return jnp.argmax(how.logits(chunk.state, weights), axis=-1)

    def best(carry: None, chunk: Chunk) -> tuple[None, Int[Array, "G n"]]:
        return carry, how.on_each(one, chunk)

    nothing = jnp.zeros(hidden.shape[:2], jnp.int32)
    _, parts = jax.lax.scan(best, None, how.chunks(state, nothing, nothing))
    return how.joined(parts[..., None], *hidden.shape[:2])[..., 0]


def _forward(
    how: HeadsLoss,
    heads: Params | None,
    softmax: Array,
    hidden: Array,
    targets: Array,
    valid: Array,
    scale: Array,
) -> tuple[tuple[Array, Array, Array], tuple[Params | None, Array, Array]]:
    """`heads_loss`, and its gradients as residuals."""
    weights = how.matrix(softmax)

    def run(carry: Any, head: _Head) -> tuple[Any, tuple[LossSums, Params | None]]:
        by_softmax, by_hidden = carry
        state, pull = jax.vjp(
            functools.partial(_head_state, how.model), head.weights, hidden
        )

        def one(chunk: Chunk) -> tuple[LossSums, Array, Array]:
            partial, error = how.sums(how.logits(chunk.state, weights), chunk)
            error = error.astype(weights.dtype)
            by_state = product("nV,VD->nD", error, weights)
            return partial, by_state, how.by_matrix(error, chunk.state)

        def add(carry: Any, chunk: Chunk) -> tuple[Any, Array]:
            total, by_softmax = carry
            partial, by_state, by_weights = how.on_each(one, chunk)
            # Scaled after the products: in bfloat16 the scale would be rounded.
            by_softmax += head.scale * by_weights
            by_softmax = how.pin(by_softmax, *spec)
            by_state = (head.scale * by_state).astype(state.dtype)
            return (_plus(total, partial), by_softmax), by_state

        zero = LossSums(jnp.float32(0), jnp.float32(0))
        chunks = how.chunks(state, head.targets, head.valid)
        (partial, by_softmax), parts = jax.lax.scan(add, (zero, by_softmax), chunks)
        by_head, by_input = pull(how.joined(parts, *hidden.shape[:2]))
        return (by_softmax, by_hidden + by_input), (partial, by_head)

    zeros = jnp.zeros((how.groups, *weights.shape), jnp.float32)
    spec = (*BATCH_SPEC, "model")
    if how.by_columns:
        zeros, spec = zeros.swapaxes(1, 2), (*BATCH_SPEC, None, "model")
    start = (
        how.pin(zeros, *spec),
        how.pin(jnp.zeros(hidden.shape, jnp.float32), *BATCH_SPEC),
    )
    (by_softmax, by_hidden), sums, by_heads = _over_heads(
        run, start, _Head(heads, targets, valid, scale)
    )
    by_softmax = by_softmax.sum(0)
    if how.by_columns:
        by_softmax = by_softmax.T
    gradients = (
        by_heads,
        by_softmax[: len(softmax)].astype(softmax.dtype),
        by_hidden.astype(hidden.dtype),
    )
    return (jnp.dot(scale, sums.loss), sums.loss, sums.correct), gradients


def _backward(
    how: HeadsLoss,
    gradients: tuple[Params | None, Array, Array],
    cotangents: tuple[Array, Array, Array],
) -> tuple[Any, ...]:
    del how
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
      run: what to do with each head.
      carry: handed from head to head.
      heads: all of them, stacked.

    Returns:
      The last carry; the sums, stacked to `[L]`; and the rest of what `run` returns,
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
        carry, (found, rest) = jax.lax.scan(run, carry, others)
        sums.append(found)
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
