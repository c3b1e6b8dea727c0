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
from bpd_jax.training.heads_loss import best_tokens, heads_loss, heads_sums
from bpd_jax.training.softmax_chunks import HeadsLoss
from bpd_jax.typing import AnyArray, Array, Bool, Float, Int, Params

# What heads 2 … L learn; see `blockwise_loss`.
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
    lambdas: tuple[float, ...] | AnyArray,
    compute: ComputeConfig = _DEFAULT,
    head_targets: str = "text",
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], HeadSums]:
    """Σ_h λ_h loss_h, where loss_h is the mean of −log p_h over valid positions.

    The paper's loss_h is the sum of −log p_h over positions (appendix C.1). Divided by
    their number, the loss and its gradient have a scale that depends neither on the
    batch nor on how much of it is padding or prompt. Heads are weighted by λ_h alike;
    by a sum, head h would count a little less than head 1, since h - 1 more positions
    at the end of each document have no target. A constant factor changes nothing under
    AdamW but what clipping by norm does; what remains is that every batch counts alike
    here, however many targets it has.

    A head without any valid position in the batch contributes 0.

    Args:
      model: sizes.
      params: of the model, stacked if `compute` says so.
      batch: B rows of T tokens.
      lambdas: λ_h, L of them.
      compute: see `ComputeConfig`; `accumulate` is the train step's.
      head_targets: `text`, or `model`: heads 2 … L learn, in place of the text's
        token, what head 1 holds for likeliest one position before it, which is what
        greedy verification accepts; valid positions stay the same.
      mesh: devices that the batch lies on; None for one device.

    Returns:
      The loss, float32, and the sums that metrics are made of.
    """
    scale = head_scale(model, batch, lambdas)
    return scaled_loss(model, params, batch, scale, compute, head_targets, mesh)


def head_scale(
    model: BlockwiseConfig, batch: Batch, lambdas: tuple[float, ...] | AnyArray
) -> Float[Array, " L"]:
    """λ_h over the number of valid positions of the batch, the weight of one."""
    valid = _text_targets(model, batch)[1]
    count = valid.sum((1, 2), dtype=jnp.float32)
    return jnp.asarray(lambdas, jnp.float32) / jnp.maximum(count, 1)


def scaled_loss(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    scale: Float[Array, " L"],
    compute: ComputeConfig = _DEFAULT,
    learned: str = "text",
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], HeadSums]:
    """Σ_h scale_h · summed loss_h: with one `head_scale`, parts of a batch add up.

    The arguments are those of `blockwise_loss`; `learned` is its `head_targets`.
    """
    with float32_sums(on_cpu(mesh)):
        return _scaled_loss(model, params, batch, scale, compute, learned, mesh)


def _scaled_loss(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    scale: Float[Array, " L"],
    compute: ComputeConfig,
    learned: str,
    mesh: Mesh | None,
) -> tuple[Float[Array, ""], HeadSums]:
    hidden, matrix, targets, valid = _run(model, params, batch, compute, mesh)
    how = HeadsLoss(model, compute.loss_chunk, mesh)
    if learned == "model":
        predicted = best_tokens(how, params.get("heads"), matrix, hidden)
        # Head h at i guesses what head 1 says at i + h - 1, about token i + h.
        guessed = [jnp.roll(predicted, -h, axis=1) for h in range(1, model.block_size)]
        targets = jnp.stack([targets[0], *guessed])
    heads = params.get("heads")
    total, loss, correct = heads_loss(how, heads, matrix, hidden, targets, valid, scale)
    return total, HeadSums(loss, correct, valid.sum((1, 2), dtype=jnp.float32))


def evaluation_sums(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    compute: ComputeConfig = _DEFAULT,
    mesh: Mesh | None = None,
) -> HeadSums:
    """The sums of a batch with the heads' entropies, against the text's tokens."""
    with float32_sums(on_cpu(mesh)):
        hidden, matrix, targets, valid = _run(model, params, batch, compute, mesh)
        how = HeadsLoss(model, compute.loss_chunk, mesh)
        sums = heads_sums(how, params.get("heads"), matrix, hidden, targets, valid)
    count = valid.sum((1, 2), dtype=jnp.float32)
    return HeadSums(sums.loss, sums.correct, count, sums.entropy)


def _run(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    compute: ComputeConfig,
    mesh: Mesh | None,
) -> tuple[Array, Array, Array, Array]:
    """Final hidden states, the softmax's matrix, targets and validity of the text."""
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
