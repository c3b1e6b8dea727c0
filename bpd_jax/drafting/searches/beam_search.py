"""Greedy walks and beam search."""

import dataclasses

import jax.numpy as jnp

from bpd_jax.base.settings import SWITCH, setting
from bpd_jax.base.typing import Array, Int, PyTree
from bpd_jax.drafting.draft_tree import DraftTree, from_drafts, take
from bpd_jax.drafting.lattice import Drafts
from bpd_jax.drafting.parts import (
    COUNT,
    DRAFTS,
    BuildContext,
    GrowingPart,
    register,
)
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.searches.growth import ChainSearch, grow_best


@dataclasses.dataclass(frozen=True)
class BeamSearch(ChainSearch):
    """The P best paths of a beam search; P = 1 is a greedy walk.

    Attributes:
      normalise: whether scores are normalised over the candidates after every path, as
        in the training of refiners.
    """

    normalise: bool = False

    def grow(
        self,
        paths: Paths,
        arrays: PyTree,
        state: PyTree,
        first: Int[Array, " B"],
        key: Array | None = None,
    ) -> DraftTree:
        """Returns the paths as chains, best first."""
        count = self.max_drafts(paths.block_size, paths.width)
        levels = grow_best(paths, arrays, state, first, count, normalise=self.normalise)
        at = jnp.broadcast_to(jnp.arange(count), (first.shape[0], count))
        tokens = []
        for level in reversed(levels):
            tokens.append(take(level.tokens, at))
            at = take(level.parents, at)
        drafts = Drafts(jnp.stack(tokens[::-1], axis=-1), levels[-1].scores)
        return from_drafts(drafts)


@register
@dataclasses.dataclass(frozen=True)
class Greedy(GrowingPart):
    """The search `greedy`."""

    name = "greedy"
    title = "Greedy walk"
    help = "one path: the best candidate at every position"
    reference = "Kim et al. 2024, Algorithm 2"
    of_heads = "BPD"
    joint = ", "

    def width(self, refined: bool) -> int | None:
        """One, unless refiners choose among more."""
        return None if refined else 1

    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> BeamSearch:
        # Normalising leaves the best candidate best.
        return BeamSearch(1)


NORMALISE = (
    "1 normalises scores among the candidates after every path, 0 does not; default 1 "
    "with trained refiners"
)


@register
@dataclasses.dataclass(frozen=True)
class Beam(GrowingPart):
    """Settings of the search `beam`."""

    name = "beam"
    title = "{paths}-best"
    help = "the P best paths of a beam search"
    note = "search beam"
    number_setting = "paths"
    counts = DRAFTS

    paths: int = setting(1, "paths P", COUNT)
    normalise: int | None = setting(None, NORMALISE, SWITCH.or_none())

    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> BeamSearch:
        if self.normalise is not None:
            normalise = bool(self.normalise)
        return BeamSearch(self.paths, normalise)
