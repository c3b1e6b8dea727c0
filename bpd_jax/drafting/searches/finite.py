"""The exact P-best search of a lattice, as array operations."""

import dataclasses

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.drafting.lattice import Drafts, Lattice, best_drafts, distinct_scores
from bpd_jax.drafting.refiners.transitions import Transitions


def best_paths(lattice: Lattice, transitions: Transitions, num_drafts: int) -> Drafts:
    """The P best distinct drafts under Σ log p_head + transition scores.

    A backward pass computes the score of the best completion of every node. A forward
    pass keeps the P prefixes with the best completions, which is exact.

    Args:
      num_drafts: P.
    """
    batch, length, width = lattice.tokens.shape
    if length == 1:  # The certain token only.
        return best_drafts(lattice, num_drafts)
    # The first axis is scanned: `steps[j]` leads to position j + 1 of the block.
    following = jnp.moveaxis(transitions.following, 1, 0)
    heads = distinct_scores(lattice)[:, 1:, None]
    steps = jnp.moveaxis(heads + transitions.scores, 1, 0)
    nodes = steps.shape[2]

    def complete(
        best: Float[Array, "B N"], step: tuple[Array, Array]
    ) -> tuple[Float[Array, "B N"], Float[Array, "B N W"]]:
        gain, target = step
        after = jax.vmap(lambda row, index: row[index])(best, target)
        total = gain + after
        return total.max(axis=-1), total

    _, totals = jax.lax.scan(
        complete, jnp.zeros((batch, nodes)), (steps, following), reverse=True
    )

    def extend(
        paths: tuple[Array, Array], step: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        node, gain = paths
        total, gains, target = (
            jax.vmap(lambda row, index: row[index])(array, node) for array in step
        )
        promise = (gain[:, :, None] + total).reshape(batch, -1)
        promise, chosen = jax.lax.top_k(promise, num_drafts)
        parent, candidate = chosen // width, chosen % width
        gain = jnp.take_along_axis(
            (gain[:, :, None] + gains).reshape(batch, -1), chosen, axis=1
        )
        gain = jnp.where(jnp.isneginf(promise), -jnp.inf, gain)
        node = jnp.take_along_axis(target.reshape(batch, -1), chosen, axis=1)
        return (node, gain), (parent, candidate)

    rank = jnp.arange(num_drafts)
    node = jnp.broadcast_to(transitions.start[:, None], (batch, num_drafts))
    gain = jnp.broadcast_to(jnp.where(rank == 0, 0.0, -jnp.inf), (batch, num_drafts))
    (_, gain), (parents, picks) = jax.lax.scan(
        extend, (node, gain), (totals, steps, following)
    )

    def trace(
        at: Int[Array, "B P"], step: tuple[Array, Array, Array]
    ) -> tuple[Int[Array, "B P"], Int[Array, "B P"]]:
        parent, pick, tokens = step
        chosen = jnp.take_along_axis(pick, at, axis=1)
        token = jnp.take_along_axis(tokens, chosen, axis=1)
        return jnp.take_along_axis(parent, at, axis=1), token

    columns = jnp.moveaxis(lattice.tokens[:, 1:], 1, 0)
    first = jnp.broadcast_to(rank, (batch, num_drafts))
    _, tokens = jax.lax.scan(trace, first, (parents, picks, columns), reverse=True)
    certain = jnp.broadcast_to(lattice.tokens[:, 0, :1], (batch, num_drafts))
    return Drafts(
        tokens=jnp.concatenate([certain[:, :, None], jnp.moveaxis(tokens, 0, 2)], 2),
        scores=gain,
    )


def normalised_transitions(lattice: Lattice, transitions: Transitions) -> Transitions:
    """Normalises the scores over the candidates after every node."""
    heads = distinct_scores(lattice)[:, 1:, None]
    total = jax.nn.logsumexp(heads + transitions.scores, axis=-1, keepdims=True)
    return dataclasses.replace(transitions, scores=transitions.scores - total)
