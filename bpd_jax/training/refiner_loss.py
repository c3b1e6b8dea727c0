"""The loss of a refiner: one cross-entropy per level, one level at a time.

The block's earlier tokens are those of the text, so that all levels of all positions
are trained at once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.data.rows import Batch
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.refiners import (
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
from bpd_jax.training.heads.loss import LevelSums, draft_places
from bpd_jax.training.loss import head_targets
from bpd_jax.typing import Array, Bool, Float, Int, Params


class Frozen(NamedTuple):
    """What the frozen model says of a batch.

    Attributes:
      hidden: h at every position.
      states: of the block heads of levels 1 … L-1.
      tokens: y_0 … y_{L-1}, the text after every position.
      targets: what levels 1 … L-1 should guess.
      valid: where they have a target.

    B × T positions of cached states are B = positions, T = 1.
    """

    hidden: Float[Array, "B T D"]
    states: Float[Array, "levels B T D"]
    tokens: Int[Array, "L B T"]
    targets: Int[Array, "levels B T"]
    valid: Bool[Array, "levels B T"]


def freeze_rows(
    model: BlockwiseConfig, base: Params, batch: Batch, *, own: bool
) -> Frozen:
    """Runs the frozen model and its block heads over B rows of T tokens.

    Args:
      model: sizes.
      base: parameters.
      batch: the rows.
      own: whether the targets are the model's own next tokens, which are what greedy
        verification accepts, in place of the text's: at position i, level j is to
        guess what the model says at i + j, after the true tokens up to there.
    """
    tokens, segment_ids, positions, loss_mask = (jnp.asarray(x) for x in batch)
    variables = {"params": base}
    hidden, _ = BlockwiseLM(model).apply(
        variables, tokens, positions, causal_mask(segment_ids)
    )
    states = BlockwiseLM(model).apply(variables, hidden, method="head_states")
    states = jnp.moveaxis(states[..., 1:, :], -2, 0)
    after, valid = head_targets(tokens, segment_ids, loss_mask, model.block_size)
    targets = after[1:]
    if own:
        logits = BlockwiseLM(model).apply(variables, hidden, method="next_token_logits")
        said = logits.argmax(-1)
        targets = jnp.stack(
            [jnp.roll(said, -level, axis=1) for level in range(1, model.block_size)]
        )
    return Frozen(hidden, states, after, targets, valid[1:])


def freeze_states(
    model: BlockwiseConfig, base: Params, batch: PositionBatch, *, own: bool
) -> Frozen:
    """Runs the block heads on cached states of n positions: B = n, T = 1.

    Args:
      model: sizes.
      base: parameters.
      batch: the positions.
      own: of no effect: the text is the model's own.
    """
    del own
    hidden = jnp.asarray(batch.states).astype(model.trunk.dtype)[:, None]
    states = BlockwiseLM(model).apply({"params": base}, hidden, method="head_states")
    states = jnp.moveaxis(states[..., 1:, :], -2, 0)
    tokens = jnp.asarray(batch.tokens).T[..., None]
    valid = jnp.asarray(batch.valid).T[..., None]
    return Frozen(hidden, states, tokens, tokens[1:], valid[1:])


def refined_sums(
    config: RefinerConfig,
    params: Params,
    model: BlockwiseConfig,
    base: Params,
    frozen: Frozen,
) -> LevelSums:
    """Sums of levels 1 … L-1 with the refiner, each given the true tokens before it.

    Args:
      config: of the refiner.
      params: of the refiner; the result has a gradient with respect to these.
      model: sizes of the frozen model.
      base: its parameters.
      frozen: what it says of the batch.
    """
    if isinstance(config, HydraConfig):
        states = _hydra_states(config, params, model, base, frozen)
        return head_sums(model, base, frozen, states)
    queries = []
    if isinstance(config, RecurrentConfig):
        state = recurrent_start(params, frozen.hidden)
        for level in config.levels:
            state = recurrent_step(params, state, frozen.tokens[level - 1])
            queries.append(recurrent_queries(params, state, level))
    else:
        queries = [
            markov_queries(params, frozen.tokens[level - 1], level)
            for level in config.levels
        ]
    return head_sums(
        model, base, frozen, frozen.states, jnp.stack(queries), params["output"]
    )


def _hydra_states(
    config: HydraConfig,
    params: Params,
    model: BlockwiseConfig,
    base: Params,
    frozen: Frozen,
) -> Float[Array, "levels B T D"]:
    embedded = BlockwiseLM(model).apply({"params": base}, frozen.tokens, method="embed")
    # Every position of the batch is a text of its own, with one path after it.
    hidden = frozen.hidden.reshape(-1, config.d_model)
    embedded = embedded.reshape(len(embedded), -1, config.d_model).swapaxes(0, 1)
    states = [
        hydra_states(config, params, hidden, embedded[:, None, :level], level)
        for level in config.levels
    ]
    return jnp.stack(states).reshape(frozen.states.shape)


def head_sums(
    model: BlockwiseConfig,
    base: Params,
    frozen: Frozen,
    states: Float[Array, "levels B T D"],
    queries: Float[Array, "levels B T R"] | None = None,
    output: Float[Array, "V R"] | None = None,
) -> LevelSums:
    """Sums of levels 1 … L-1; only one level's logits exist at a time.

    A target outside the draft vocabulary costs nothing and counts as a miss.

    Args:
      model: sizes of the frozen model.
      base: its parameters.
      frozen: what it says of the batch.
      states: inputs of its softmax.
      queries: of the corrections of the logits, `queries · output`; None for none.
      output: see `queries`.
    """

    vocabulary = base.get("heads", {}).get("vocabulary")
    places, known = draft_places(frozen.targets, vocabulary, model.trunk.vocab_size)
    if output is not None and vocabulary is not None:
        output = output[vocabulary]

    # Of a level only the sums are kept: going backward computes its logits again.
    @jax.checkpoint
    def level_sums(
        output: Any,
        level: Array,
        state: Array,
        query: Any,
        place: Array,
        known: Array,
        valid: Array,
    ) -> LevelSums:
        logits = BlockwiseLM(model).apply(
            {"params": base}, state, level, method="draft_logits"
        )
        if query is not None:
            logits += jnp.einsum("BTR,VR->BTV", query, output)
        found = jnp.take_along_axis(logits, place[..., None], -1)[..., 0]
        losses = jax.nn.logsumexp(logits, -1) - found
        correct = (found == logits.max(-1)) & valid & known
        return LevelSums(
            jnp.sum(losses, where=valid & known),
            jnp.sum(correct, dtype=jnp.float32),
            jnp.sum(valid & known, dtype=jnp.float32),
            jnp.sum(valid, dtype=jnp.float32),
        )

    def add_level(carry: None, level: Any) -> tuple[None, LevelSums]:
        return carry, level_sums(output, *level)

    levels = jnp.arange(1, model.block_size)
    every_level = (levels, states, queries, places, known, frozen.valid)
    return jax.lax.scan(add_level, None, every_level)[1]
