"""Cross-entropy of all heads of a model, one head at a time.

The outer loop is over heads: the layer of a head runs once over whole rows, forward and
backward, and only its softmax is computed in chunks (`cross_entropy`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.models.block_heads import apply_head
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.partitioning import BATCH_SPEC
from bpd_jax.training.cross_entropy import LossInputs, SoftmaxLoss


class LossLayout(NamedTuple):
    """The static arguments of the heads' loss.

    Attributes:
      model: sizes.
      chunk: positions of a row whose logits are computed at once; None for all.
      mesh: devices that split rows and vocabulary; None for one device.
    """

    model: BlockwiseConfig
    chunk: int | None = None
    mesh: Mesh | None = None

    @property
    def softmax(self) -> SoftmaxLoss:
        """The cross-entropy of one head."""
        trunk = self.model.trunk
        return SoftmaxLoss(trunk.vocab_size, trunk.dtype, self.chunk, self.mesh)


class LossSums(NamedTuple):
    """Sums over the valid positions of each head, `[L]`, float32.

    Attributes:
      loss: −log p of the targets.
      correct: targets that the head ranks first.
      entropy: of the head, in nats; None in training.
    """

    loss: Array
    correct: Array
    entropy: Array | None = None


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
    return _forward(layout, heads, softmax, hidden, targets, valid, scale)[0]


def heads_sums(
    layout: LossLayout,
    heads: Params | Float[Array, "levels B T D"] | None,
    softmax: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "L B T"],
    valid: Bool[Array, "L B T"],
) -> LossSums:
    """The sums of all heads, `[L]`, without gradients; see `heads_loss`."""
    loss = layout.softmax
    matrix = loss.matrix(softmax)

    def sums_of(chunk: LossInputs) -> LossSums:
        logits = loss.logits(chunk.state, matrix)
        losses, correct, log_total = loss.hard_losses(logits, chunk.targets)
        probabilities = jnp.exp(logits - log_total[:, None])
        entropy = log_total - (probabilities * logits).sum(-1)
        return jax.tree.map(
            lambda x: jnp.sum(x, where=chunk.weights, dtype=jnp.float32),
            LossSums(losses, correct, entropy),
        )

    def run(carry: None, head: _Head) -> tuple[None, tuple[LossSums, None]]:
        state = _head_state(layout.model, head.weights, hidden)
        chunks = loss.chunks(LossInputs(state, head.targets, head.valid))
        parts = jax.lax.map(lambda chunk: loss.per_group(sums_of, chunk), chunks)
        return carry, (jax.tree.map(jnp.sum, parts), None)

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
    loss = layout.softmax
    matrix = loss.matrix(softmax)
    state = _head_state(layout.model, first, hidden)

    def best(chunk: LossInputs) -> Int[Array, " n"]:
        return jnp.argmax(loss.logits(chunk.state, matrix), axis=-1)

    nothing = jnp.zeros(hidden.shape[:2], jnp.int32)
    chunks = loss.chunks(LossInputs(state, nothing, nothing))
    parts = jax.lax.map(lambda chunk: loss.per_group(best, chunk), chunks)
    return loss.unchunked(parts, *hidden.shape[:2])


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
    loss = layout.softmax
    matrix = loss.matrix(softmax)

    def run(carry: Any, head: _Head) -> tuple[Any, tuple[LossSums, Params | None]]:
        by_matrix, by_hidden = carry
        state, pull = jax.vjp(
            functools.partial(_head_state, layout.model), head.weights, hidden
        )
        positions = LossInputs(state, head.targets, head.valid)
        losses, by_state, by_matrix = loss.gradients(
            matrix, positions, by_matrix, head.scale
        )
        by_head, by_input = pull(by_state)
        correct = jnp.sum(losses.correct, where=head.valid, dtype=jnp.float32)
        sums = LossSums(losses.total, correct)
        return (by_matrix, by_hidden + by_input), (sums, by_head)

    zeros = loss.sharded(jnp.zeros(hidden.shape, jnp.float32), *BATCH_SPEC)
    start = (loss.no_gradient(matrix), zeros)
    (by_matrix, by_hidden), sums, by_heads = _over_heads(
        run, start, _Head(heads, targets, valid, scale)
    )
    gradients = (
        by_heads,
        loss.matrix_gradient(by_matrix).astype(softmax.dtype),
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
