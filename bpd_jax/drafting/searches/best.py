"""The P best paths: exact for refiners with finitely many states, else a beam.

What is here:

- `best_paths`: the exact search, as two scans that a decode loop contains;
- `Best`: its settings as a part of methods, `/best:16`, and the choice of an engine: on
  the device, or under one n-gram model on the host, compiled (`engines.viterbi`) or by
  OpenFst as in the paper (`engines.fst`);
- scores that are normalised after every node, as local rescoring has them.
"""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import SWITCH, choice, setting
from bpd_jax.base.typing import AnyArray, Array, Float, Int
from bpd_jax.drafting.engines.host import HostDrafter, HostEngine
from bpd_jax.drafting.interface import Drafter, Search, Source
from bpd_jax.drafting.lattice import Drafts, Lattice, best_drafts, distinct_scores
from bpd_jax.drafting.parts import (
    COUNT,
    DRAFTS,
    BuildContext,
    GrowingPart,
    RefinerPart,
    register,
)
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.ngram import NGramInputs, NGramRefiner
from bpd_jax.drafting.refiners.transitions import (
    Transitions,
    WeightedParams,
    over_lattice,
)
from bpd_jax.drafting.searches.beam_search import NORMALISE, BeamSearch
from bpd_jax.drafting.searches.growth import LatticeSearch
from bpd_jax.models.device_ops import on_cpu

AUTO, DEVICE, VITERBI, FST = ENGINES = ("auto", "device", "viterbi", "fst")


@dataclasses.dataclass(frozen=True)
class ExactBest(LatticeSearch):
    """The P best paths of a lattice, exactly (paper section 7.2), in the decode loop.

    Attributes:
      normalise: whether scores are normalised over the candidates after every node.
    """

    normalise: bool = False

    def search(
        self, lattice: Lattice, transitions: Transitions | None, count: int
    ) -> Drafts:
        """Returns the paths, best first."""
        if transitions is None:
            return best_drafts(lattice, count)
        if self.normalise:
            transitions = normalised_transitions(lattice, transitions)
        return best_paths(lattice, transitions, count)


def best_under_ngram(
    refiner: NGramRefiner,
    lattice: Lattice,
    context: Int[AnyArray, "B C"],
    num_drafts: int,
    *,
    arrays: WeightedParams | None = None,
) -> Drafts:
    """The P best distinct drafts under Σ log p_head + α · log p_ngram (section 7.2).

    Args:
      refiner: an n-gram refiner that is not adaptive.
      context: the last `refiner.context_length` tokens of the text before it.
      num_drafts: P.
      arrays: arrays of the refiner, if they are an argument of jitted code.
    """
    if lattice.tokens.shape[1] == 1:  # The certain token only.
        return best_drafts(lattice, num_drafts)
    all_arrays = (refiner.arrays if arrays is None else arrays,)
    search = functools.partial(ExactBest().search, count=num_drafts)
    return over_lattice(
        (refiner,), all_arrays, lattice, (NGramInputs(context),), search
    )


@register
@dataclasses.dataclass(frozen=True)
class Best(GrowingPart):
    """Settings of the search `best`."""

    name = "best"
    title = "{paths}-best"
    help = "the P best paths, exactly unless refiners rule it out"
    reference = "Kim et al. 2024, section 7.2"
    number_setting = "paths"
    counts = DRAFTS

    paths: int = setting(1, "paths P", COUNT)
    engine: str = setting(
        AUTO,
        "of the n-gram search: device (in the decode loop), viterbi (on the host) or "
        "fst (OpenFst on the host, with back-off as an epsilon arc, as in the paper)",
        choice(*ENGINES),
    )
    normalise: int | None = setting(None, NORMALISE, SWITCH.or_none())

    @property
    def engine_label(self) -> str:
        """The engine, if it was chosen."""
        return "" if self.engine == AUTO else self.engine

    def drafter(
        self, context: BuildContext, source: Source, refiners: tuple[RefinerPart, ...]
    ) -> Drafter:
        """Builds the drafter of source, refiners and search, or of a host engine."""
        host = self._host_engine(context, refiners)
        if host is None:
            return super().drafter(context, source, refiners)
        search = ExactBest(self.paths)
        return HostDrafter(Paths(source), search, host.context_length, host)

    def _host_engine(
        self, context: BuildContext, refiners: tuple[RefinerPart, ...]
    ) -> HostEngine | None:
        """The engine on the host, if there is one; all methods share its tables."""
        weight = None
        if len(refiners) == 1 and not self.normalise:
            weight = refiners[0].host_weight(context)
        engine = self.engine
        if engine == AUTO:
            engine = DEVICE if weight is None else default_engine()
        if engine == DEVICE:
            return None
        if weight is None:
            raise UserError(
                f"{context.method}: engine={engine} supports a single n-gram model, "
                "not adaptive; use engine=device, or omit it."
            )
        model = context.need("ngram")

        def create() -> HostEngine:
            if engine == VITERBI:
                from bpd_jax.drafting.engines.viterbi import ViterbiEngine

                return ViterbiEngine(model)
            from bpd_jax.drafting.engines.fst import FstEngine

            return FstEngine(model)

        host: HostEngine = context.share(engine, create)
        return host.with_weight(*weight)

    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> Search:
        if self.normalise is not None:
            normalise = bool(self.normalise)
        if paths.others or not paths.source.offers_lattice:
            return BeamSearch(self.paths, normalise)
        return ExactBest(self.paths, normalise)


def default_engine() -> str:
    """The fastest engine of the exact n-gram search on this device."""
    on_host = on_cpu() and importlib.util.find_spec("numba")
    return VITERBI if on_host else DEVICE


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

    # ---- Backward: the score of the best completion of every node ----
    def complete(
        best: Float[Array, "B N"], step: tuple[Array, Array]
    ) -> tuple[Float[Array, "B N"], Float[Array, "B N W"]]:
        gain, target = step
        # One number for each node serves all prefixes that end in it: what follows
        # depends on the node alone.
        after = jax.vmap(lambda row, index: row[index])(best, target)
        total = gain + after
        return total.max(axis=-1), total

    _, totals = jax.lax.scan(
        complete, jnp.zeros((batch, nodes)), (steps, following), reverse=True
    )

    # ---- Forward: the P prefixes with the best completions, position by position ----
    def extend(
        paths: tuple[Array, Array], step: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        node, gain = paths
        total, gains, target = (
            jax.vmap(lambda row, index: row[index])(array, node) for array in step
        )
        # The score of the best whole draft with this prefix. The P best drafts have at
        # most P prefixes of this length, and those promise most: nothing else need be
        # kept. A beam search, which compares prefixes by what they have so far, may
        # drop one whose completion is better.
        promise = (gain[:, :, None] + total).reshape(batch, -1)
        promise, chosen = jax.lax.top_k(promise, num_drafts)
        # An index into P paths with W candidates each.
        parent, candidate = chosen // width, chosen % width
        gain = jnp.take_along_axis(
            (gain[:, :, None] + gains).reshape(batch, -1), chosen, axis=1
        )
        # A prefix that cannot be completed is no path.
        gain = jnp.where(jnp.isneginf(promise), -jnp.inf, gain)
        node = jnp.take_along_axis(target.reshape(batch, -1), chosen, axis=1)
        return (node, gain), (parent, candidate)

    # All paths begin at one node: one of them counts, the others are empty.
    rank = jnp.arange(num_drafts)
    node = jnp.broadcast_to(transitions.start[:, None], (batch, num_drafts))
    gain = jnp.broadcast_to(jnp.where(rank == 0, 0.0, -jnp.inf), (batch, num_drafts))
    (_, gain), (parents, picks) = jax.lax.scan(
        extend, (node, gain), (totals, steps, following)
    )

    # ---- Back along the parents: the tokens of each path ----
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
