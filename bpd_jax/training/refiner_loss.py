"""The inputs of a refiner's loss: states of the frozen model and the refined softmax.

With teacher forcing, the earlier tokens of a block are those of the text, so all levels
of all positions are trained at once. n is the number of positions, B × T for packed
rows.
"""

from typing import NamedTuple

import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.data.rows import Batch
from bpd_jax.models.attention import Segments
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.trained_refiners import (
    HydraConfig,
    RecurrentConfig,
    RefinerConfig,
    hydra_states,
    markov_queries,
    recurrent_queries,
    recurrent_start,
    recurrent_step,
)
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
    variables = {"params": base}
    hidden, *_ = BlockwiseLM(model).apply(
        variables, tokens, positions, Segments(segment_ids)
    )
    states = BlockwiseLM(model).apply(variables, hidden, method="head_states")
    after, valid = head_targets(tokens, segment_ids, loss_mask, model.block_size)
    targets = after[1:]
    if model_targets:
        logits = BlockwiseLM(model).apply(variables, hidden, method="next_token_logits")
        best = logits.argmax(-1)
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


def draft_softmax(
    model: BlockwiseConfig, base: Params
) -> Float[Array, "#levels draft D"]:
    """The softmax matrices of heads 2 … L: one that they share, or one for each."""
    if model.heads is not None and model.heads.has_softmax:
        matrix = base["heads"]["softmax"]
    else:
        matrix = softmax_rows(model, base, None)
    matrix = matrix.astype(model.trunk.dtype)
    return matrix if matrix.ndim == 3 else matrix[None]


def refined_inputs(
    config: RefinerConfig,
    params: Params,
    model: BlockwiseConfig,
    base: Params,
    frozen: BaseOutputs,
) -> tuple[Float[Array, "n levels R"], Float[Array, "#levels draft R"]]:
    """Inputs and matrices of the refined softmax of all levels.

    A correction of the logits adds columns: [state, query] · [softmax, output]ᵀ.
    """
    matrix = draft_softmax(model, base)
    tokens = frozen.tokens
    if isinstance(config, HydraConfig):
        embedded = BlockwiseLM(model).apply({"params": base}, tokens, method="embed")
        # Each position of the batch is treated as one text with a single path.
        states = [
            hydra_states(config, params, frozen.hidden, embedded[:, None, :j], j)
            for j in config.levels
        ]
        return jnp.concatenate(states, axis=1), matrix
    queries = []
    if isinstance(config, RecurrentConfig):
        state = recurrent_start(params, frozen.hidden)
        for level in config.levels:
            state = recurrent_step(params, state, tokens[:, level - 1])
            queries.append(recurrent_queries(params, state, level))
    else:
        queries = [
            markov_queries(params, tokens[:, level - 1], level)
            for level in config.levels
        ]
    vocabulary = base.get("heads", {}).get("vocabulary")
    output = params["output"] if vocabulary is None else params["output"][vocabulary]
    output = jnp.broadcast_to(output.astype(matrix.dtype), (len(matrix), *output.shape))
    inputs = jnp.concatenate([frozen.states, jnp.stack(queries, axis=1)], axis=-1)
    return inputs, jnp.concatenate([matrix, output], axis=-1)
