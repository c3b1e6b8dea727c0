"""What a refiner's loss reads: states of the frozen model, and targets.

With teacher forcing, the earlier tokens of a block are those of the text, so all levels
of all positions are trained at once. n is the number of positions, B × T for packed
rows.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.data.rows import Batch
from bpd_jax.models.attention import Segments
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.training.heads.batches import PositionBatch
from bpd_jax.training.loss import head_targets


class BaseOutputs(NamedTuple):
    """The outputs of the frozen model on a batch, and the targets.

    States are those of the block heads of levels 1 … L-1; `tokens` are y_0 … y_{L-1},
    those after every position.
    """

    hidden: Float[Array, "n D"]
    states: Float[Array, "n levels D"]
    tokens: Int[Array, "n L"]
    targets: Int[Array, "n levels"]
    valid: Bool[Array, "n levels"]


def outputs_of_rows(
    model: BlockwiseConfig, base: Params, batch: Batch, *, model_targets: bool
) -> BaseOutputs:
    """Runs the frozen model and its block heads on B rows of T tokens.

    With `model_targets` the target of level j at position i is the model's own most
    probable token at i + j, given the text up to there, which is what greedy
    verification accepts; otherwise that of the text.
    """
    tokens, segment_ids, positions, loss_mask = (jnp.asarray(x) for x in batch)
    run = functools.partial(BlockwiseLM(model).apply, {"params": base})
    hidden, *_ = run(tokens, positions, Segments(segment_ids))
    states = run(hidden, method="head_states")
    after, valid = head_targets(tokens, segment_ids, loss_mask, model.block_size)
    targets = after[1:]
    if model_targets:
        best = run(hidden, method="next_token_logits").argmax(-1)
        targets = jnp.stack(
            [jnp.roll(best, -level, axis=1) for level in range(1, model.block_size)]
        )
    by_position = (x.reshape(len(x), -1).T for x in (after, targets, valid[1:]))
    return BaseOutputs(
        hidden.reshape(-1, hidden.shape[-1]),
        states[..., 1:, :].reshape(-1, *states[0, 0, 1:].shape),
        *by_position,
    )


def outputs_of_states(
    model: BlockwiseConfig, base: Params, batch: PositionBatch, *, model_targets: bool
) -> BaseOutputs:
    """Runs the block heads on cached states of n positions.

    The model has generated the text, so both kinds of targets are the same.
    """
    del model_targets
    hidden = jnp.asarray(batch.states).astype(model.trunk.dtype)
    states = BlockwiseLM(model).apply({"params": base}, hidden, method="head_states")
    tokens, valid = jnp.asarray(batch.tokens), jnp.asarray(batch.valid)
    return BaseOutputs(hidden, states[:, 1:], tokens, tokens[:, 1:], valid[:, 1:])
