"""Measures heads on cached states, one head and some positions at a time."""

from typing import Any

import jax
import jax.numpy as jnp

from bpd_jax.models.config import BlockHeadsConfig
from bpd_jax.models.heads import apply_head, layer_shapes
from bpd_jax.training.heads.cross_entropy import chunk_size
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
    products: str = "float32",
) -> HeldOut:
    """Sums over some positions; see `loss_and_gradients` for the arguments."""
    states = states.astype(products)
    width = states.shape[-1]
    rows = heads["softmax"].shape[1] if matrix is None else matrix.shape[0]
    chunk = chunk_size(len(states), rows)

    def add_level(carry: None, level: Any) -> tuple[None, tuple[Array, Array]]:
        weights, own, target = level
        softmax = jnp.asarray(matrix if own is None else own, products)

        def look(part: Any) -> tuple[Array, Array]:
            state, places, scored = part
            state = apply_head(config, weights, state, dtype=products)
            logits = jnp.einsum(
                "nD,VD->nV", state, softmax, preferred_element_type=jnp.float32
            )
            found = jnp.take_along_axis(logits, places[:, None], 1)
            losses = jax.nn.logsumexp(logits, 1) - found[:, 0]
            return jnp.sum(losses, where=scored), jnp.sum(logits > found, 1)

        parts = (
            states.reshape(-1, chunk, width),
            target.places.reshape(-1, chunk),
            target.scored.reshape(-1, chunk),
        )
        losses, ranks = jax.lax.map(look, parts)
        return carry, (losses.sum(), ranks.ravel())

    layers = {name: heads[name] for name in layer_shapes(config, width)}
    own = heads["softmax"] if matrix is None else None
    _, (loss, ranks) = jax.lax.scan(add_level, None, (layers, own, targets))
    return held_out_of(loss, ranks, targets)


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
