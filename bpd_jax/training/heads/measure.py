"""Measures heads on cached states."""

import jax
import jax.numpy as jnp

from bpd_jax.models.config import BlockHeadsConfig
from bpd_jax.models.heads import apply_head, layer_shapes
from bpd_jax.training.heads.cross_entropy import by_level, levels_ranks
from bpd_jax.training.heads.held_out import HeldOut, chain_counts, rank_counts
from bpd_jax.training.heads.loss import Targets
from bpd_jax.typing import Array, Float, Params


def head_sums(
    config: BlockHeadsConfig,
    heads: Params,
    matrix: Float[Array, "draft D"] | None,
    states: Float[Array, "n D"],
    targets: Targets,
    *,
    side: Float[Array, "n C"] | None = None,
    products: str = "float32",
) -> HeldOut:
    """Sums over some positions; see `loss_and_gradients` for the arguments."""
    states = states.astype(products)
    side = None if side is None else side.astype(products)

    def look(weights: Params) -> Array:
        return apply_head(config, weights, states, side, dtype=products)

    layers = {name: heads[name] for name in layer_shapes(config, states.shape[-1])}
    inputs = jnp.moveaxis(jax.lax.map(look, layers), 0, 1)
    matrices = heads["softmax"] if matrix is None else jnp.asarray(matrix)[None]
    losses, ranks = by_level(
        levels_ranks, matrices.astype(products), (inputs, targets.places.T)
    )
    return held_out_of(
        jnp.sum(losses.T, axis=1, where=targets.scored), ranks.T, targets
    )


def held_out_of(
    loss: Float[Array, " levels"], ranks: Array, targets: Targets
) -> HeldOut:
    """All sums, from those of the losses and the ranks `[levels, n]` of the targets."""
    scored, valid = targets.scored, targets.valid
    return HeldOut(
        loss,
        rank_counts(ranks, scored),
        scored.sum(1, dtype=jnp.float32),
        valid.sum(1, dtype=jnp.float32),
        chain_counts(ranks, scored, valid),
    )
