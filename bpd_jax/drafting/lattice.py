"""The lattice of a block: W candidates at each of L positions."""

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import AnyArray, Array, Float, Int


@flax.struct.dataclass
class Lattice:
    """Candidates of the next L tokens, best first, with log-probabilities.

    Position 0 is the certain token, the model's choice of the next token: its first
    candidate has log-probability 0, the others -inf. A lattice has W^(L-1) paths.

    Attributes:
      tokens: the candidates.
      log_probs: log-probabilities, normalised over the whole vocabulary, so that the
        weights of refiners do not depend on W.
      entropies: entropy of the distribution at each position, in nats; 0 at position
        0.
      factors: factors of a Markov head that reads the states of the source
        (`trained_refiners.markov_factors`), at positions 1 … L-1; usually None.
    """

    tokens: Int[Array, "B L W"]
    log_probs: Float[Array, "B L W"]
    entropies: Float[Array, "B L"]
    factors: Float[Array, "B L-1 R"] | None = None


@flax.struct.dataclass
class Drafts:
    """The P best drafts of a lattice, best first; unused ones have score -inf."""

    tokens: Int[AnyArray, "B P L"]
    scores: Float[AnyArray, "B P"]


def build_lattice(
    next_token: Int[Array, " B"],
    tokens: Int[Array, "B L-1 W"],
    log_probs: Float[Array, "B L-1 W"],
    entropies: Float[Array, "B L-1"],
    factors: Float[Array, "B L-1 R"] | None = None,
) -> Lattice:
    """The lattice of the certain token and the best candidates of heads 2 … L."""
    batch, _, width = tokens.shape
    certain = jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf)
    certain = jnp.broadcast_to(certain, (batch, 1, width))
    first = jnp.broadcast_to(next_token[:, None, None], (batch, 1, width))
    return Lattice(
        tokens=jnp.concatenate([first.astype(tokens.dtype), tokens], axis=1),
        log_probs=jnp.concatenate([certain, log_probs], axis=1),
        entropies=jnp.pad(entropies, ((0, 0), (1, 0))),
        factors=factors,
    )


def best_drafts(lattice: Lattice, count: int) -> Drafts:
    """The `count` paths with the highest sums of log-probabilities ("0-gram" p-best).

    Heads are independent, so keeping the P best prefixes of each length is exact. With
    `count=1`, the draft is that of blockwise parallel decoding: the best token of every
    head.
    """
    batch, length, _ = lattice.tokens.shape
    tokens = jnp.zeros((batch, count, length), lattice.tokens.dtype)
    scores = jnp.where(jnp.arange(count) == 0, 0.0, -jnp.inf)
    scores = jnp.broadcast_to(scores, (batch, count))
    for position in range(length):
        # All extensions of all prefixes, flattened as [B, P × W].
        step = lattice.log_probs[:, position]
        extended = (scores[:, :, None] + step[:, None, :]).reshape(batch, -1)
        scores, chosen = jax.lax.top_k(extended, count)
        parent, candidate = jnp.divmod(chosen, step.shape[-1])
        tokens = jnp.take_along_axis(tokens, parent[:, :, None], axis=1)
        token = jnp.take_along_axis(lattice.tokens[:, position], candidate, axis=1)
        tokens = tokens.at[:, :, position].set(token)
    return Drafts(tokens, scores)


def covered(log_probs: Float[Array, "... W"]) -> Float[Array, "..."]:
    """Logarithm of the probability of all candidates of a position together."""
    return jnp.minimum(jax.nn.logsumexp(log_probs, axis=-1), 0.0)


def distinct_scores(lattice: Lattice) -> Float[Array, "B L W"]:
    """Log-probabilities, -inf for all but the best of repeated tokens of a position."""
    width = lattice.tokens.shape[-1]
    better = lattice.log_probs[..., None, :] > lattice.log_probs[..., None]
    same = lattice.tokens[..., None, :] == lattice.tokens[..., None]
    equal = lattice.log_probs[..., None, :] == lattice.log_probs[..., None]
    earlier = jnp.arange(width) < jnp.arange(width)[:, None]
    repeated = (same & (better | (equal & earlier))).any(axis=-1)
    return jnp.where(repeated, -jnp.inf, lattice.log_probs)


def most_prefixes(block_size: int, width: int, count: int) -> int:
    """Upper bound of the distinct prefixes of `count` paths."""
    return sum(min(count, width**depth) for depth in range(block_size))
