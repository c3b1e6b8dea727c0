"""The loss of a blockwise model: one cross-entropy per head, one head at a time."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.data.rows import Batch
from bpd_jax.models.attention import Segments
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.compute import ComputeConfig
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.heads import softmax_rows
from bpd_jax.models.products import float32_sums, on_cpu
from bpd_jax.training.chunked_loss import best_tokens, heads_loss, heads_sums
from bpd_jax.training.softmax_chunks import LossLayout
from bpd_jax.typing import AnyArray, Array, Bool, Float, Int, Params

# Targets of heads 2 … L; see `blockwise_loss`.
TARGETS = ("text", "model")

_DEFAULT = ComputeConfig()


class HeadSums(NamedTuple):
    """Sums over the valid positions of a batch, per head; they add up over batches.

    Attributes:
      loss: `[L]` −log p of the targets.
      correct: `[L]` targets that the head ranks first.
      valid: `[L]` valid positions.
      entropy: `[L]` entropies of the head, in nats; None in training.
    """

    loss: Float[Array, " L"]
    correct: Float[Array, " L"]
    valid: Float[Array, " L"]
    entropy: Float[Array, " L"] | None = None


def head_targets(
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    num_heads: int,
) -> tuple[Int[Array, "L B T"], Bool[Array, "L B T"]]:
    """The targets of each head, and a mask of the valid ones.

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
    lambdas: tuple[float, ...] | AnyArray,
    compute: ComputeConfig = _DEFAULT,
    head_targets: str = "text",
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], HeadSums]:
    """Σ_h λ_h loss_h, where loss_h is the mean of −log p_h over valid positions.

    The paper's loss_h is the sum of −log p_h over positions (appendix C.1). Here it is
    the mean, so that the scale of the loss and its gradient depends neither on the
    batch size nor on the amount of padding and prompt. There are two differences: every
    batch has the same weight regardless of its number of targets; and a sum would give
    head h slightly less weight than head 1, because h - 1 more positions at the end of
    each document have no target. A constant factor would only affect clipping by norm,
    since AdamW is invariant to the scale of the gradient.

    A head without a valid position in the batch contributes 0.

    Args:
      model: sizes.
      params: parameters of the model, stacked if `compute.scan_layers`.
      batch: B rows of T tokens.
      lambdas: λ_h, L of them.
      compute: see `ComputeConfig`; `accumulate` is not used here.
      head_targets: `text`, or `model`: the target of heads 2 … L is not the token of
        the text but the one that head 1 predicts from the position before it, which is
        what greedy verification accepts; valid positions are the same.
      mesh: devices that hold the batch; None for one device.

    Returns:
      The loss, float32, and sums for the metrics.
    """
    scale = head_scale(model, batch, lambdas)
    return scaled_loss(model, params, batch, scale, compute, head_targets, mesh)


def head_scale(
    model: BlockwiseConfig, batch: Batch, lambdas: tuple[float, ...] | AnyArray
) -> Float[Array, " L"]:
    """The weight of each valid position: λ_h over their number in the batch."""
    valid = _text_targets(model, batch)[1]
    count = valid.sum((1, 2), dtype=jnp.float32)
    return jnp.asarray(lambdas, jnp.float32) / jnp.maximum(count, 1)


def scaled_loss(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    scale: Float[Array, " L"],
    compute: ComputeConfig = _DEFAULT,
    targets_from: str = "text",
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], HeadSums]:
    """Σ_h scale_h · Σ loss_h; with the batch's `head_scale`, its parts add up.

    The arguments are those of `blockwise_loss`; `targets_from` is its `head_targets`.
    """
    with float32_sums(on_cpu(mesh)):
        return _scaled_loss(model, params, batch, scale, compute, targets_from, mesh)


def _scaled_loss(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    scale: Float[Array, " L"],
    compute: ComputeConfig,
    targets_from: str,
    mesh: Mesh | None,
) -> tuple[Float[Array, ""], HeadSums]:
    hidden, matrix, targets, valid = _run(model, params, batch, compute, mesh)
    layout = LossLayout(model, compute.loss_chunk, mesh)
    if targets_from == "model":
        predicted = best_tokens(layout, params.get("heads"), matrix, hidden)
        # The target of head h at i is head 1's prediction of token i + h, made at
        # i + h - 1.
        later = [jnp.roll(predicted, -h, axis=1) for h in range(1, model.block_size)]
        targets = jnp.stack([targets[0], *later])
    heads = params.get("heads")
    total, loss, correct = heads_loss(
        layout, heads, matrix, hidden, targets, valid, scale
    )
    return total, HeadSums(loss, correct, valid.sum((1, 2), dtype=jnp.float32))


def evaluation_sums(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    compute: ComputeConfig = _DEFAULT,
    mesh: Mesh | None = None,
) -> HeadSums:
    """The sums of a batch with the heads' entropies; targets are those of the text."""
    with float32_sums(on_cpu(mesh)):
        hidden, matrix, targets, valid = _run(model, params, batch, compute, mesh)
        layout = LossLayout(model, compute.loss_chunk, mesh)
        sums = heads_sums(layout, params.get("heads"), matrix, hidden, targets, valid)
    count = valid.sum((1, 2), dtype=jnp.float32)
    return HeadSums(sums.loss, sums.correct, count, sums.entropy)


def _run(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    compute: ComputeConfig,
    mesh: Mesh | None,
) -> tuple[Array, Array, Array, Array]:
    """Final hidden states, softmax matrix, and targets of the text with their mask."""
    hidden, _ = BlockwiseLM(model, compute, mesh).apply(
        {"params": params},
        jnp.asarray(batch.tokens),
        jnp.asarray(batch.positions),
        Segments(jnp.asarray(batch.segment_ids)),
    )
    targets, valid = _text_targets(model, batch)
    return hidden, softmax_rows(model, params, None), targets, valid


def _text_targets(
    model: BlockwiseConfig, batch: Batch
) -> tuple[Int[Array, "L B T"], Bool[Array, "L B T"]]:
    tokens, segment_ids, _, loss_mask = (jnp.asarray(x) for x in batch)
    return head_targets(tokens, segment_ids, loss_mask, model.block_size)
