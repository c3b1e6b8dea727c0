"""A block drafter in the training of a whole model: its anchors and their states.

Heads that are trained at some positions of a row draw them in the same way.

In each packed row some tokens are drawn as the last accepted ones of a block. The
token after each is the anchor y_0, and the drafter predicts y_1 … y_{L-1}, which are
the targets of heads 2 … L at that position. A block attends to its own document alone.
"""

import jax
import jax.numpy as jnp

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Float, Int, Params
from bpd_jax.data.rows import Batch
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions


def draw_positions(
    batch: Batch, count: int, step: Int[Array, ""] | int
) -> Int[Array, "B A"]:
    """Draws A positions with a token after them in every row, in ascending order.

    A row is cut into A parts of almost equal length, and one position is drawn from
    each. The draw depends on the step and the tokens of the row alone, so neither the
    mesh nor accumulation changes it.
    """
    tokens = jnp.asarray(batch.tokens)
    length = tokens.shape[1]
    if count > length - 1:
        raise UserError(
            f"TrainConfig.anchors_per_row or positions_per_row = {count} must be less "
            f"than the {length} tokens of a row: lower it."
        )
    weights = 2 * jnp.arange(length, dtype=jnp.uint32) + 1
    hashes = jnp.sum(tokens.astype(jnp.uint32) * weights, axis=1, dtype=jnp.uint32)
    key = jax.random.fold_in(jax.random.key(0), step)

    def shares(row: Array) -> Float[Array, " A"]:
        return jax.random.uniform(jax.random.fold_in(key, row), (count,))

    starts = jnp.arange(count) * (length - 1) // count
    ends = (jnp.arange(count) + 1) * (length - 1) // count
    drawn = jax.vmap(shares)(hashes) * (ends - starts)
    return starts + jnp.minimum(drawn.astype(jnp.int32), ends - starts - 1)


def block_states(
    model: BlockwiseConfig,
    params: Params,
    batch: Batch,
    features: Float[Array, "B T F"],
    positions: Int[Array, "B A"],
) -> Float[Array, "L-1 B A D"]:
    """The inputs of the softmax for y_1 … y_{L-1} of the blocks at drawn positions."""
    assert isinstance(model.drafter, BlockDrafterConfig)
    functions = DrafterFunctions(model.drafter.resolve(model.trunk), model.trunk)
    tokens = jnp.asarray(batch.tokens)
    anchors = jnp.take_along_axis(tokens, positions + 1, axis=1)
    states = functions.teacher_forced_states(
        params["drafter"],
        features,
        jnp.asarray(batch.positions),
        params["trunk"]["embedding"].astype(model.trunk.dtype)[anchors],
        positions + 1,
        jnp.asarray(batch.segment_ids),
    )
    return jnp.moveaxis(states, 2, 0)
