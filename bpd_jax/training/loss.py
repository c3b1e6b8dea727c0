"""The loss of a blockwise model: one cross-entropy per head, one head at a time."""

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.settings import Count, Validated, choice
from bpd_jax.base.typing import AnyArray, Array, Bool, Float, Int, Params
from bpd_jax.data.rows import Batch
from bpd_jax.models import cpu
from bpd_jax.models.attention import Segments
from bpd_jax.models.block_heads import apply_head, softmax_rows
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.compute import ComputeConfig
from bpd_jax.training.cross_entropy import (
    Head,
    LossInputs,
    SoftmaxLoss,
    over_heads,
    weighted_losses,
)
from bpd_jax.training.drafter_blocks import block_states, draw_positions

# Targets of heads 2 … L; see `LossSettings`.
TARGETS = ("text", "model")

_DEFAULT = ComputeConfig()


@dataclasses.dataclass(frozen=True)
class LossSettings(Validated):
    """Settings of the loss besides λ.

    Attributes:
      head_targets: targets of heads 2 … L: the tokens of the `text`, or `model`: the
        token that head 1 ranks first one position before, which is what greedy
        verification accepts. The valid positions are the same.
      anchors_per_row: A, blocks of a block drafter that are drawn from each row.
      positions_per_row: A, positions of each row at which heads 2 … L are trained,
        drawn anew in each step; None for all. The loss over them estimates that over
        all positions (not exactly without bias: the parts of a row that are drawn from
        differ by a position in length, and their numbers of targets vary). A step is
        faster, because the softmaxes of these heads are most of the arithmetic of a
        small model. Evaluation uses all positions.
    """

    head_targets: Annotated[str, choice(*TARGETS)] = "text"
    anchors_per_row: Count = 32
    positions_per_row: Count | None = None

    def drawn_per_row(self, model: BlockwiseConfig) -> int | None:
        """A, the drawn positions of a row: of blocks or of heads; None for no draw."""
        if model.drafter is not None:
            return self.anchors_per_row
        return None if model.heads is None else self.positions_per_row


_SETTINGS = LossSettings()


class HeadSums(NamedTuple):
    """Sums over the valid positions of a batch, per head; they add up over batches.

    Attributes:
      loss: `[L]` −log p of the targets.
      correct: `[L]` targets that the head ranks first.
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

    Invalid targets are arbitrary ids of the vocabulary.

    Args:
      segment_ids: 1, 2, … per document of a row; 0 is padding.
      loss_mask: true for tokens that may be targets.
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
    settings: LossSettings = _SETTINGS,
    mesh: Mesh | None = None,
    step: Int[Array, ""] | int = 0,
) -> tuple[Float[Array, ""], HeadSums]:
    """Σ_h λ_h loss_h, where loss_h is the mean of −log p_h over valid positions.

    The paper's loss_h is the sum of −log p_h over positions (appendix C.1). Here it is
    the mean, so that the scale of the loss and its gradient depends neither on the
    batch size nor on the amount of padding and prompt. There are two differences: every
    batch has the same weight regardless of its number of targets; and a sum would give
    head h slightly less weight than head 1, because h - 1 more positions at the end of
    each document have no target. A constant factor would only affect clipping by norm,
    since AdamW is invariant to the scale of the gradient.

    With a block drafter in place of heads, loss_2 … loss_L are those of its positions,
    over blocks that are drawn from the batch (`drafter_blocks`). With
    `LossSettings.positions_per_row`, loss_2 … loss_L of heads are means over the valid
    ones of the positions that are drawn in the same way.

    A head without any valid position in the batch contributes 0.

    Args:
      params: parameters of the model, stacked if `compute.scan_layers`.
      compute: see `ComputeConfig`; `accumulate` is the train step's.
      step: index of the training step; blocks of a drafter are drawn anew in each.
    """
    scale = head_scale(model, batch, lambdas, settings, step)
    return scaled_loss(model, params, batch, scale, compute, settings, mesh, step)


def head_scale(
    model: BlockwiseConfig,
    batch: Batch,
    lambdas: tuple[float, ...] | AnyArray,
    settings: LossSettings = _SETTINGS,
    step: Int[Array, ""] | int = 0,
) -> Float[Array, " L"]:
    """The weight of each valid position: λ_h over their number in the batch."""
    valid = _text_targets(model, batch)[1]
    drawn = _drawn_positions(model, batch, settings, step)
    count = _counts(_per_part(valid, drawn))
    return jnp.asarray(lambdas, jnp.float32) / jnp.maximum(count, 1)


def scaled_loss(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    scale: Float[Array, " L"],
    compute: ComputeConfig = _DEFAULT,
    settings: LossSettings = _SETTINGS,
    mesh: Mesh | None = None,
    step: Int[Array, ""] | int = 0,
) -> tuple[Float[Array, ""], HeadSums]:
    """Σ_h scale_h · Σ loss_h; with the batch's `head_scale`, its parts add up.

    The arguments are those of `blockwise_loss`.
    """
    drawn = _drawn_positions(model, batch, settings, step)
    softmax = softmax_loss(model, compute.loss_chunk, mesh)
    with cpu.float32_sums(mesh):
        parts, matrix = _run(model, params, batch, compute, mesh, drawn)
        targets, valid = _text_targets(model, batch)
        if settings.head_targets == "model":
            heads, hidden = params.get("heads"), parts[0].hidden
            predicted = _best_tokens(model, softmax, heads, matrix, hidden)
            # Head h at i predicts the token of head 1 at i + h - 1, about token i + h.
            later = [jnp.roll(predicted, -h, axis=1) for h in range(1, len(targets))]
            targets = jnp.stack([targets[0], *later])
        valid_parts = _per_part(valid, drawn)
        scales = (scale,) if drawn is None else (scale[:1], scale[1:])
        results = []
        for part, *of_part in zip(
            parts, _per_part(targets, drawn), valid_parts, scales, strict=True
        ):
            tokens, mask, weights = of_part
            heads = Head(part.heads, tokens, mask, None, weights)
            results.append(heads_loss(model, softmax, matrix, part.hidden, heads))
    totals, losses, correct = zip(*results, strict=True)
    total = functools.reduce(jnp.add, totals)
    sums = HeadSums(
        jnp.concatenate(losses), jnp.concatenate(correct), _counts(valid_parts)
    )
    return total, sums


def evaluation_sums(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    compute: ComputeConfig = _DEFAULT,
    settings: LossSettings = _SETTINGS,
    mesh: Mesh | None = None,
) -> HeadSums:
    """The sums of a batch with the heads' entropies, against the text's tokens."""
    settings = dataclasses.replace(settings, positions_per_row=None)
    drawn = _drawn_positions(model, batch, settings, 0)
    softmax = softmax_loss(model, compute.loss_chunk, mesh)
    targets, valid = (_per_part(x, drawn) for x in _text_targets(model, batch))
    with cpu.float32_sums(mesh):
        parts, matrix = _run(model, params, batch, compute, mesh, drawn)
        sums = []
        for part, tokens, mask in zip(parts, targets, valid, strict=True):
            heads = Head(part.heads, tokens, mask, None, jnp.ones(len(tokens)))
            sums.append(_heads_sums(model, softmax, matrix, part.hidden, heads))
    return jax.tree.map(lambda *x: jnp.concatenate(x), *sums)


class _Part(NamedTuple):
    """Heads whose targets have one shape: `heads` and `hidden` of `heads_loss`."""

    heads: Any
    hidden: Float[Array, "B T D"]


def _run(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    compute: ComputeConfig,
    mesh: Mesh | None,
    drawn: Int[Array, "B A"] | None,
) -> tuple[list[_Part], Float[Array, "V D"]]:
    """The states of all heads, and the matrix of the softmax."""
    hidden, _, features = BlockwiseLM(model, compute, mesh).apply(
        {"params": params},
        jnp.asarray(batch.tokens),
        jnp.asarray(batch.positions),
        Segments(jnp.asarray(batch.segment_ids)),
        layers=model.feature_layers,
    )
    matrix, heads = softmax_rows(model, params, None), params.get("heads")
    if drawn is None:
        return [_Part(heads, hidden)], matrix
    if model.heads is None:
        states = block_states(model, params, batch, features, drawn)
        return [_Part(None, hidden), _Part(states, jnp.zeros_like(states[0]))], matrix
    first = None
    if model.heads.first_has_ffn:
        first = jax.tree.map(lambda x: x[:1], heads)
        heads = jax.tree.map(lambda x: x[1:], heads)
    at_drawn = jnp.take_along_axis(hidden, drawn[..., None], axis=1)
    return [_Part(first, hidden), _Part(heads, at_drawn)], matrix


def softmax_loss(
    model: BlockwiseConfig, chunk: int | None = None, mesh: Mesh | None = None
) -> SoftmaxLoss:
    """The cross-entropy of one head."""
    return SoftmaxLoss(model.trunk.vocab_size, model.trunk.dtype, chunk, mesh)


def heads_loss(
    model: BlockwiseConfig,
    softmax: SoftmaxLoss,
    matrix: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    heads: Head,
) -> tuple[Float[Array, ""], Float[Array, " L"], Float[Array, " L"]]:
    """Σ_h scale_h · loss_h, where loss_h is the sum over valid positions.

    The heads have the mask of valid targets as weights; the layers of a block drafter
    are the states of its positions. Returns also the loss and the number of correct
    targets of each head.
    """
    apply = functools.partial(_head_state, model)
    total, losses = weighted_losses(softmax, apply, matrix, hidden, heads)
    correct = jnp.sum(losses.correct, (1, 2), where=heads.weights, dtype=jnp.float32)
    return total, losses.total, correct


def _heads_sums(
    model: BlockwiseConfig,
    softmax: SoftmaxLoss,
    matrix: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    heads: Head,
) -> HeadSums:
    """The sums of all heads with their entropies, without gradients."""
    rows = softmax.matrix(matrix)

    def sums_of(chunk: LossInputs) -> HeadSums:
        logits = softmax.logits(chunk.state, rows)
        losses, correct, log_total = softmax.hard_losses(logits, chunk.targets)
        probabilities = jnp.exp(logits - log_total[:, None])
        entropy = log_total - (probabilities * logits).sum(-1)
        return jax.tree.map(
            lambda x: jnp.sum(x, where=chunk.weights, dtype=jnp.float32),
            HeadSums(losses, correct, chunk.weights, entropy),
        )

    def run(carry: None, head: Head) -> tuple[None, tuple[HeadSums, None]]:
        state = _head_state(model, head.layer, hidden)
        chunks = softmax.chunks(LossInputs(state, head.targets, head.weights))
        parts = jax.lax.map(lambda chunk: softmax.per_group(sums_of, chunk), chunks)
        return carry, (jax.tree.map(jnp.sum, parts), None)

    return over_heads(run, None, heads)[1]


def _best_tokens(
    model: BlockwiseConfig,
    softmax: SoftmaxLoss,
    heads: Params | Float[Array, "levels B T D"] | None,
    matrix: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
) -> Int[Array, "B T"]:
    """The most probable token of head 1 at every position, without gradient."""
    first = None
    if model.heads is not None and model.heads.first_has_ffn:
        assert heads is not None
        first = jax.tree.map(lambda x: x[0], heads)
    first, matrix, hidden = jax.lax.stop_gradient((first, matrix, hidden))
    rows = softmax.matrix(matrix)
    state = _head_state(model, first, hidden)

    def best(chunk: LossInputs) -> Int[Array, " n"]:
        return jnp.argmax(softmax.logits(chunk.state, rows), axis=-1)

    nothing = jnp.zeros(hidden.shape[:2], jnp.int32)
    chunks = softmax.chunks(LossInputs(state, nothing, nothing))
    parts = jax.lax.map(lambda chunk: softmax.per_group(best, chunk), chunks)
    return softmax.unchunked(parts, *hidden.shape[:2])


def _head_state(
    model: BlockwiseConfig,
    layer: Params | Float[Array, "B T D"] | None,
    hidden: Float[Array, "B T D"],
) -> Float[Array, "B T D"]:
    """The input of a head's softmax."""
    if layer is None:
        return hidden
    if model.heads is None:
        return layer
    return apply_head(model.heads, layer, hidden, dtype=model.trunk.dtype)


def _drawn_positions(
    model: BlockwiseConfig, batch: Batch, settings: LossSettings, step: Any
) -> Int[Array, "B A"] | None:
    """The positions at which heads 2 … L, or a drafter, are trained; None for all."""
    count = settings.drawn_per_row(model)
    return None if count is None else draw_positions(batch, count, step)


def _per_part(array: Array, drawn: Int[Array, "B A"] | None) -> tuple[Array, ...]:
    """Splits `[L, B, T]` like `_run`: all heads, or `[1, B, T]` and `[L-1, B, A]`."""
    if drawn is None:
        return (array,)
    return array[:1], jnp.take_along_axis(array[1:], drawn[None], axis=2)


def _counts(valid: tuple[Array, ...]) -> Float[Array, " L"]:
    """Valid positions of each head."""
    return jnp.concatenate([x.sum((1, 2), dtype=jnp.float32) for x in valid])


def _text_targets(
    model: BlockwiseConfig, batch: Batch
) -> tuple[Int[Array, "L B T"], Bool[Array, "L B T"]]:
    tokens, segment_ids, _, loss_mask = (jnp.asarray(x) for x in batch)
    return head_targets(tokens, segment_ids, loss_mask, model.num_losses)
