"""The P drafts that together have the most expected accepted tokens.

The P best paths (paper, section 7.2) maximise the probability of a whole draft. They
often differ only in their last tokens, which are rarely reached, so that P drafts cost
more than they gain. What counts is the number of accepted tokens: its expectation is
the sum of the probabilities of all distinct prefixes of the drafts,

    E[accepted] = Σ over prefixes x_1 … x_j of  q(x_1) q(x_2 | x_1) … q(x_j | …),

because the longest accepted prefix of length n contains n accepted prefixes. The
prefixes form a tree with non-negative weights. For such trees it is optimal to add one
path after the other, each time the one that adds the largest weight: the P drafts are
found exactly, for every P at once (the drafts for P - 1 are the first P - 1).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import setting
from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.drafting.interface import Search
from bpd_jax.drafting.lattice import Drafts, Lattice, covered, distinct_scores
from bpd_jax.drafting.parts import (
    COUNT,
    DRAFTS,
    BuildContext,
    GrowingPart,
    register,
)
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.transitions import (
    Transitions,
    of_candidates,
)
from bpd_jax.drafting.searches.growth import (
    TEMPERATURE,
    LatticeSearch,
    normalised,
)


class _Steps(NamedTuple):
    """The steps from every node of a lattice, in [0, 1] and in expected tokens.

    Attributes:
      probability: q of the candidate after the node.
      gain: expected accepted tokens of the step and the best path after it, if the node
        is reached: q (1 + best gain of the next node).
      following: the next node.
    """

    probability: Float[Array, "B L-1 N W"]
    gain: Float[Array, "B L-1 N W"]
    following: Int[Array, "B L-1 N W"]


def _steps(lattice: Lattice, transitions: Transitions, temperature: float) -> _Steps:
    heads = distinct_scores(lattice)[:, 1:, None]
    mass = covered(heads)[..., None]
    scores = normalised(heads + transitions.scores, temperature) + mass
    probability = jnp.exp(scores)

    def complete(
        best: Float[Array, "B N"], step: tuple[Array, Array]
    ) -> tuple[Float[Array, "B N"], Float[Array, "B N W"]]:
        chance, target = step
        # A token counts if all before it are accepted; the best path continues.
        gain = chance * (1 + jax.vmap(lambda row, index: row[index])(best, target))
        return gain.max(axis=-1), gain

    scanned = (
        jnp.moveaxis(probability, 1, 0),
        jnp.moveaxis(transitions.following, 1, 0),
    )
    none = jnp.zeros((scores.shape[0], scores.shape[2]))
    _, gain = jax.lax.scan(complete, none, scanned, reverse=True)
    return _Steps(probability, jnp.moveaxis(gain, 0, 1), transitions.following)


def covering_drafts(
    lattice: Lattice,
    transitions: Transitions | None,
    num_drafts: int,
    temperature: float = 1.0,
) -> Drafts:
    """The drafts that maximise the expected number of accepted tokens, largest first.

    Args:
      transitions: transitions of the refiners; None without refiners.
      num_drafts: P.
      temperature: see `growth.normalised`.

    Returns:
      Distinct drafts. Their scores are the logarithms of what each adds to the
      expected number of accepted tokens; -inf for drafts that add nothing.
    """
    batch, length, width = lattice.tokens.shape
    if transitions is None:
        transitions = of_candidates(jnp.zeros((batch, length - 1, width)))
    if length == 1:  # The certain token only.
        scores = jnp.where(jnp.arange(num_drafts) == 0, 0.0, -jnp.inf)
        tokens = jnp.broadcast_to(
            lattice.tokens[:, None, 0, :1], (batch, num_drafts, 1)
        )
        return Drafts(tokens, jnp.broadcast_to(scores, (batch, num_drafts)))
    steps = _steps(lattice, transitions, temperature)
    return jax.vmap(_cover_row, in_axes=(0, 0, 0, None))(
        steps, transitions.start, lattice.tokens, num_drafts
    )


def _cover_row(
    steps: _Steps, start: Int[Array, ""], tokens: Int[Array, "L W"], num_drafts: int
) -> Drafts:
    """The drafts of one row; `steps` without the axis of rows.

    Draft d owns the prefixes that no earlier draft has. `gains[d, j, w]` is what a new
    draft adds that follows draft d for j drafted tokens and continues with candidate w.
    """
    length, _, width = steps.gain.shape

    def walk(
        node: Array, picks: Array, begin: Array, pick: Array
    ) -> tuple[Array, Array]:
        """Follows `picks` up to position `begin`, takes `pick`, then the best steps."""

        def step(
            carry: tuple[Array, Array], at: Array
        ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
            node, reached = carry
            best = steps.gain[at, node].argmax()
            chosen = jnp.where(
                at == begin, pick, jnp.where(at < begin, picks[at], best)
            )
            # What branches add here: from position `begin` on, which this draft owns.
            free = jnp.arange(width) != chosen
            owned = (at > begin) & free
            gains = jnp.where(owned, reached * steps.gain[at, node], 0.0)
            after = reached * steps.probability[at, node, chosen]
            return (steps.following[at, node, chosen], after), (chosen, gains)

        one = jnp.ones((), steps.gain.dtype)
        _, (chosen, gains) = jax.lax.scan(step, (node, one), jnp.arange(length))
        return chosen, gains

    gains = jnp.zeros((num_drafts, length, width), steps.gain.dtype)
    picks = jnp.zeros((num_drafts, length), jnp.int32)
    # The first draft branches before the first step: it owns all its prefixes.
    best = steps.gain[0, start]
    first, first_gains = walk(start, picks[0], jnp.int32(-1), jnp.int32(0))
    picks, gains = picks.at[0].set(first), gains.at[0].set(first_gains)
    added = jnp.zeros(num_drafts, steps.gain.dtype).at[0].set(best.max())

    def add(
        rank: Array, found: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        picks, gains, added = found
        # The branch that adds most comes next. What it adds is fixed: a prefix belongs
        # to the first draft that has it, and counts there alone.
        flat = gains.reshape(-1)
        index = flat.argmax()
        draft, begin, pick = jnp.unravel_index(index, gains.shape)
        gain = flat[index]
        chosen, own = walk(start, picks[draft], begin, pick)
        gains = gains.at[draft, begin, pick].set(0.0).at[rank].set(own)
        # Nothing is left to add: the draft is unused, and so are its branches.
        gains = gains.at[rank].multiply(gain > 0)
        return picks.at[rank].set(chosen), gains, added.at[rank].set(gain)

    picks, _, added = jax.lax.fori_loop(1, num_drafts, add, (picks, gains, added))
    drafted = jnp.take_along_axis(tokens[1:], picks.T, axis=1).T
    certain = jnp.broadcast_to(tokens[0, 0], (num_drafts, 1))
    # The certain token of the first draft is accepted even if nothing else is.
    score = jnp.log(added.at[0].add(1.0))
    return Drafts(jnp.concatenate([certain, drafted], axis=1), score)


@dataclasses.dataclass(frozen=True)
class CoverSearch(LatticeSearch):
    """The drafts of `covering_drafts`, in the decode loop.

    Attributes:
      temperature: see `growth.normalised`.
    """

    temperature: float = 1.0

    def search(
        self, lattice: Lattice, transitions: Transitions | None, count: int
    ) -> Drafts:
        """Returns the drafts, largest first."""
        return covering_drafts(lattice, transitions, count, self.temperature)


@register
@dataclasses.dataclass(frozen=True)
class Cover(GrowingPart):
    """Settings of the search `cover`."""

    name = "cover"
    title = "{paths} covering"
    help = "the P drafts with the most expected accepted tokens, exactly"
    number_setting = "paths"
    counts = DRAFTS

    paths: int = setting(16, "drafts P", COUNT)
    temperature: float = setting(1.0, *TEMPERATURE)

    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> Search:
        """Builds the search, which always normalises scores."""
        if paths.others or not paths.source.offers_lattice:
            raise UserError(
                f"{context.method}: cover needs a lattice (heads or block) and "
                "refiners with finitely many states (ngram, markov); use tree or best."
            )
        return CoverSearch(self.paths, self.temperature)
