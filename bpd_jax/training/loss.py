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
from bpd_jax.models.block_heads import apply_head, softmax_rows
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.products import float32_sums
from bpd_jax.models.segment_attention import Segments
from bpd_jax.models.transformer_config import ComputeConfig
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


class _Part(NamedTuple):
    """Heads whose targets have one shape: `heads` and `hidden` of `heads_loss`."""

    heads: Any
    hidden: Float[Array, "B T D"]


@dataclasses.dataclass(frozen=True)
class BlockwiseLoss:
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
    ones of the positions that are drawn in the same way, anew in each `step`.

    A head without any valid position in the batch contributes 0.

    Attributes:
      model: sizes; its parameters are stacked if `compute.scan_layers`.
      compute: see `ComputeConfig`; `accumulate` is the train step's.
      settings: see `LossSettings`.
      mesh: devices over which a batch is sharded; None for one device.
    """

    model: BlockwiseConfig
    compute: ComputeConfig = _DEFAULT
    settings: LossSettings = LossSettings()
    mesh: Mesh | None = None

    def __call__(
        self,
        params: Params,
        batch: Batch,
        lambdas: tuple[float, ...] | AnyArray,
        step: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, ""], HeadSums]:
        """The loss, float32, and sums for the metrics."""
        scale = self.head_scale(batch, lambdas, step)
        return self.scaled(params, batch, scale, step)

    def head_scale(
        self,
        batch: Batch,
        lambdas: tuple[float, ...] | AnyArray,
        step: Int[Array, ""] | int,
    ) -> Float[Array, " L"]:
        """The weight of each valid position: λ_h over their number in the batch."""
        valid = self._targets(batch)[1]
        count = _counts(_per_part(valid, self._drawn(batch, self.settings, step)))
        return jnp.asarray(lambdas, jnp.float32) / jnp.maximum(count, 1)

    def scaled(
        self,
        params: Params,
        batch: Batch,
        scale: Float[Array, " L"],
        step: Int[Array, ""] | int,
    ) -> tuple[Float[Array, ""], HeadSums]:
        """Σ_h scale_h · Σ loss_h; with the batch's `head_scale`, its parts add up."""
        drawn = self._drawn(batch, self.settings, step)
        with float32_sums(self.mesh):
            parts, matrix = self._run(params, batch, drawn)
            targets, valid = self._targets(batch)
            if self.settings.head_targets == "model":
                heads, hidden = params.get("heads"), parts[0].hidden
                predicted = self._best_tokens(heads, matrix, hidden)
                # Head h at i predicts the token of head 1 at i + h - 1, about i + h.
                after = range(1, len(targets))
                later = [jnp.roll(predicted, -h, axis=1) for h in after]
                targets = jnp.stack([targets[0], *later])
            valid_parts = _per_part(valid, drawn)
            scales = (scale,) if drawn is None else (scale[:1], scale[1:])
            results = []
            for part, *of_part in zip(
                parts, _per_part(targets, drawn), valid_parts, scales, strict=True
            ):
                tokens, mask, weights = of_part
                heads = Head(part.heads, tokens, mask, None, weights)
                results.append(self.heads_loss(matrix, part.hidden, heads))
        totals, losses, correct = zip(*results, strict=True)
        total = functools.reduce(jnp.add, totals)
        sums = HeadSums(
            jnp.concatenate(losses), jnp.concatenate(correct), _counts(valid_parts)
        )
        return total, sums

    def evaluation_sums(self, params: Params, batch: Batch) -> HeadSums:
        """The sums of a batch with the heads' entropies, against the text's tokens."""
        settings = dataclasses.replace(self.settings, positions_per_row=None)
        drawn = self._drawn(batch, settings, 0)
        targets, valid = (_per_part(x, drawn) for x in self._targets(batch))
        with float32_sums(self.mesh):
            parts, matrix = self._run(params, batch, drawn)
            sums = []
            for part, tokens, mask in zip(parts, targets, valid, strict=True):
                heads = Head(part.heads, tokens, mask, None, jnp.ones(len(tokens)))
                sums.append(self._heads_sums(matrix, part.hidden, heads))
        return jax.tree.map(lambda *x: jnp.concatenate(x), *sums)

    @property
    def softmax(self) -> SoftmaxLoss:
        trunk, chunk = self.model.trunk, self.compute.loss_chunk
        return SoftmaxLoss(trunk.vocab_size, trunk.dtype, chunk, self.mesh)

    def heads_loss(
        self, matrix: Float[Array, "V D"], hidden: Float[Array, "B T D"], heads: Head
    ) -> tuple[Float[Array, ""], Float[Array, " L"], Float[Array, " L"]]:
        """Σ_h scale_h · loss_h, where loss_h is the sum over valid positions.

        The heads have the mask of valid targets as weights; the layers of a block
        drafter are the states of its positions. Returns also the loss and the number of
        correct targets of each head.
        """
        arrays = matrix, hidden, heads
        total, losses = weighted_losses(self.softmax, self._head_state, *arrays)
        correct = jnp.sum(
            losses.correct, (1, 2), where=heads.weights, dtype=jnp.float32
        )
        return total, losses.total, correct

    def _run(
        self, params: Params, batch: Batch, drawn: Int[Array, "B A"] | None
    ) -> tuple[list[_Part], Float[Array, "V D"]]:
        """The states of all heads, and the matrix of the softmax."""
        model = self.model
        hidden, _, features = BlockwiseLM(model, self.compute, self.mesh).apply(
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
            drafter = _Part(states, jnp.zeros_like(states[0]))
            return [_Part(None, hidden), drafter], matrix
        first = None
        if model.heads.first_has_ffn:
            first = jax.tree.map(lambda x: x[:1], heads)
            heads = jax.tree.map(lambda x: x[1:], heads)
        at_drawn = jnp.take_along_axis(hidden, drawn[..., None], axis=1)
        return [_Part(first, hidden), _Part(heads, at_drawn)], matrix

    def _heads_sums(
        self, matrix: Float[Array, "V D"], hidden: Float[Array, "B T D"], heads: Head
    ) -> HeadSums:
        """The sums of all heads with their entropies, without gradients."""
        softmax = self.softmax
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
            state = self._head_state(head.layer, hidden)
            chunks = softmax.chunks(LossInputs(state, head.targets, head.weights))
            parts = jax.lax.map(lambda chunk: softmax.per_group(sums_of, chunk), chunks)
            return carry, (jax.tree.map(jnp.sum, parts), None)

        return over_heads(run, None, heads)[1]

    def _best_tokens(
        self,
        heads: Params | Float[Array, "levels B T D"] | None,
        matrix: Float[Array, "V D"],
        hidden: Float[Array, "B T D"],
    ) -> Int[Array, "B T"]:
        """The most probable token of head 1 at every position, without gradient."""
        softmax, first = self.softmax, None
        if self.model.heads is not None and self.model.heads.first_has_ffn:
            assert heads is not None
            first = jax.tree.map(lambda x: x[0], heads)
        first, matrix, hidden = jax.lax.stop_gradient((first, matrix, hidden))
        rows = softmax.matrix(matrix)
        state = self._head_state(first, hidden)

        def best(chunk: LossInputs) -> Int[Array, " n"]:
            return jnp.argmax(softmax.logits(chunk.state, rows), axis=-1)

        nothing = jnp.zeros(hidden.shape[:2], jnp.int32)
        chunks = softmax.chunks(LossInputs(state, nothing, nothing))
        parts = jax.lax.map(lambda chunk: softmax.per_group(best, chunk), chunks)
        return softmax.unchunked(parts, *hidden.shape[:2])

    def _head_state(
        self,
        layer: Params | Float[Array, "B T D"] | None,
        hidden: Float[Array, "B T D"],
    ) -> Float[Array, "B T D"]:
        if layer is None:
            return hidden
        if self.model.heads is None:
            return layer
        dtype = self.model.trunk.dtype
        return apply_head(self.model.heads, layer, hidden, dtype=dtype)

    def _drawn(
        self, batch: Batch, settings: LossSettings, step: Int[Array, ""] | int
    ) -> Int[Array, "B A"] | None:
        """The positions at which heads 2 … L, or a drafter, are trained; None: all."""
        count = settings.drawn_per_row(self.model)
        return None if count is None else draw_positions(batch, count, step)

    def _targets(
        self, batch: Batch
    ) -> tuple[Int[Array, "L B T"], Bool[Array, "L B T"]]:
        tokens, segment_ids, _, loss_mask = (jnp.asarray(x) for x in batch)
        return head_targets(tokens, segment_ids, loss_mask, self.model.num_losses)


def _per_part(array: Array, drawn: Int[Array, "B A"] | None) -> tuple[Array, ...]:
    """Splits `[L, B, T]` like `_run`: all heads, or `[1, B, T]` and `[L-1, B, A]`."""
    if drawn is None:
        return (array,)
    return array[:1], jnp.take_along_axis(array[1:], drawn[None], axis=2)


def _counts(valid: tuple[Array, ...]) -> Float[Array, " L"]:
    return jnp.concatenate([x.sum((1, 2), dtype=jnp.float32) for x in valid])
