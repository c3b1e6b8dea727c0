"""The loss of a blockwise model: one cross-entropy per head, one head at a time."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.data.rows import Batch
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.heads import apply_head, softmax_rows
from bpd_jax.typing import Array, Bool, Float, Int, Params


class HeadSums(NamedTuple):
    """Sums over the valid positions of a batch, per head; they add up over batches.

    Attributes:
      loss: `[L]` −log p of the targets.
      correct: `[L]` targets that the head ranks first.
      valid: `[L]` valid positions.
    """

    loss: Float[Array, " L"]
    correct: Float[Array, " L"]
    valid: Float[Array, " L"]


def head_targets(
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    num_heads: int,
) -> tuple[Int[Array, "L B T"], Bool[Array, "L B T"]]:
    """What each head should predict, and where.

    Head h at position i predicts `tokens[i + h]`. That is valid if i + h lies in the
    row, in the segment of i, which is not padding, and `loss_mask[i + h]` is true.

    >>> tokens = jnp.array([[7, 8, 9, 5, 6, 0]])
    >>> segment_ids = jnp.array([[1, 1, 1, 2, 2, 0]])
    >>> targets, valid = head_targets(tokens, segment_ids, segment_ids > 0, 2)
    >>> (targets * valid)[:, 0].tolist()
    [[8, 9, 0, 6, 0, 0], [9, 0, 0, 0, 0, 0]]
    >>> valid[:, 0].astype(int).tolist()
    [[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]]

    Args:
      tokens: ids.
      segment_ids: 1, 2, … per document of a row; 0 is padding.
      loss_mask: true for tokens that may be targets.
      num_heads: L.

    Returns:
      Targets and validity; invalid targets are arbitrary ids of the vocabulary.
    """
    length = tokens.shape[1]
    targets, valid = [], []
    for shift in range(1, num_heads + 1):
        inside = jnp.arange(length) + shift < length
        ahead = functools.partial(jnp.roll, shift=-shift, axis=1)
        same = (segment_ids > 0) & (ahead(segment_ids) == segment_ids)
        targets.append(ahead(tokens))
        valid.append(inside & same & ahead(loss_mask))
    return jnp.stack(targets), jnp.stack(valid)


def blockwise_loss(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    lambdas: tuple[float, ...],
) -> tuple[Float[Array, ""], HeadSums]:
    """Σ_h λ_h loss_h, where loss_h is the mean of −log p_h over valid positions.

    A head without any valid position in the batch contributes 0.

    Args:
      model: sizes.
      params: of the model.
      batch: B rows of T tokens.
      lambdas: λ_h, L of them.

    Returns:
      The loss, float32, and the sums that metrics are made of.
    """
    tokens, segment_ids, positions, loss_mask = (jnp.asarray(x) for x in batch)
    hidden, _ = BlockwiseLM(model).apply(
        {"params": params}, tokens, positions, causal_mask(segment_ids)
    )
    targets, valid = head_targets(tokens, segment_ids, loss_mask, model.block_size)
    count = valid.sum((1, 2), dtype=jnp.float32)
    scale = jnp.asarray(lambdas, jnp.float32) / jnp.maximum(count, 1)
    total, losses, correct = heads_loss(
        model,
        params.get("heads"),
        softmax_rows(model, params, None),
        hidden,
        targets,
        valid,
        scale,
    )
    return total, HeadSums(losses, correct, count)


class _Head(NamedTuple):
    """One head's share of the arguments of `heads_loss`; `weights` may be None."""

    weights: Params | None
    targets: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    scale: Float[Array, ""]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def heads_loss(
    model: BlockwiseConfig,
    heads: Params | None,
    embedding: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "L B T"],
    valid: Bool[Array, "L B T"],
    scale: Float[Array, " L"],
) -> tuple[Float[Array, ""], Float[Array, " L"], Float[Array, " L"]]:
    """Σ_h scale_h · loss_h of summed losses; then loss and correct targets per head.

    Only one head's logits exist at a time. Differentiation finds a head's gradients
    while its logits are there, so nothing of size V is kept or computed twice. Only
    the first result has a gradient, with respect to `heads`, `embedding`, `hidden`.
    """
    weights = embedding.astype(model.trunk.dtype)

    def add_head(total: Array, head: _Head) -> tuple[Array, tuple[Any, None]]:
        loss, sums = _head_loss(model, head.weights, weights, hidden, head)
        return total + loss, (sums, None)

    every_head = (heads, targets, valid, scale)
    total, sums, _ = _over_heads(model, add_head, jnp.float32(0), every_head)
    return total, *sums


def _forward(
    model: BlockwiseConfig,
    heads: Params | None,
    embedding: Array,
    hidden: Array,
    targets: Array,
    valid: Array,
    scale: Array,
) -> tuple[tuple[Array, Array, Array], tuple[Params | None, Array, Array]]:
    """`heads_loss`, and its gradients as residuals."""
    weights = embedding.astype(model.trunk.dtype)
    differentiate = jax.value_and_grad(_head_loss, (1, 2, 3), has_aux=True)

    def add_head(carry: Any, head: _Head) -> tuple[Any, Any]:
        (loss, sums), (by_head, *shared) = differentiate(
            model, head.weights, weights, hidden, head
        )
        carry = jax.tree.map(jnp.add, carry, (loss, *shared))
        return carry, (sums, by_head)

    # Heads add up in float32 whatever their precision.
    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (embedding, hidden))
    every_head = (heads, targets, valid, scale)
    carry, sums, by_heads = _over_heads(
        model, add_head, (jnp.float32(0), *zeros), every_head
    )
    total, by_embedding, by_hidden = carry
    gradients = (
        by_heads,
        by_embedding.astype(embedding.dtype),
        by_hidden.astype(hidden.dtype),
    )
    return (total, *sums), gradients


def _backward(
    model: BlockwiseConfig,
    gradients: tuple[Params | None, Array, Array],
    cotangents: tuple[Array, Array, Array],
) -> tuple[Any, ...]:
    del model
    scaled = jax.tree.map(lambda x: (cotangents[0] * x).astype(x.dtype), gradients)
    return (*scaled, None, None, None)


heads_loss.defvjp(_forward, _backward)


def _over_heads(
    model: BlockwiseConfig,
    add_head: Callable[[Any, _Head], tuple[Any, tuple[Any, Any]]],
    carry: Any,
    every_head: tuple[Params | None, Array, Array, Array],
) -> tuple[Any, tuple[Array, Array], Any]:
    """`lax.scan` over the heads, preceded by head 1 if it has no layer of its own.

    Returns:
      The last carry; the two sums of `_head_loss`, each stacked to `[L]`; and the
      rest of what `add_head` returns, stacked over the heads that have a layer.
    """
    weights, *per_head = every_head
    plain = model.block_size - (0 if model.heads is None else model.heads.num_ffns)
    sums = []
    for index in range(plain):
        head = _Head(None, *(x[index] for x in per_head))
        carry, (first, _) = add_head(carry, head)
        sums.append(jax.tree.map(lambda x: x[None], first))
    rest = None
    if weights is not None:
        # Faster than an unrolled loop on a CPU, and it needs a sixth of the memory.
        heads = _Head(weights, *(x[plain:] for x in per_head))
        carry, (others, rest) = jax.lax.scan(add_head, carry, heads)
        sums.append(others)
    losses, correct = (jnp.concatenate(parts) for parts in zip(*sums, strict=True))
    return carry, (losses, correct), rest


def _head_loss(
    model: BlockwiseConfig,
    weights: Params | None,
    embedding: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    head: _Head,
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, ""]]]:
    """scale · summed loss of one head; then the loss and the number correct."""
    state = hidden
    if weights is not None:
        assert model.heads is not None
        state = apply_head(model.heads, weights, hidden, dtype=model.trunk.dtype)
    logits = jnp.einsum(
        "BTD,VD->BTV", state, embedding, preferred_element_type=jnp.float32
    )
    target = jnp.take_along_axis(logits, head.targets[..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(logits, -1) - target
    loss = jnp.sum(losses, where=head.valid)
    # Cheaper than an argmax: the maximum is known from the log-sum-exp.
    correct = jnp.sum((target == logits.max(-1)) & head.valid, dtype=jnp.float32)
    return head.scale * loss, (loss, correct)
