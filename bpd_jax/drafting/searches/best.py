"""The P best paths: exact for refiners with finitely many states, else a beam."""

import dataclasses
import functools
import importlib.util

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import SWITCH, choice, setting
from bpd_jax.base.typing import AnyArray, Int
from bpd_jax.drafting.engines.host import HostDrafter, HostEngine
from bpd_jax.drafting.interface import Drafter, Search, Source
from bpd_jax.drafting.lattice import Drafts, Lattice, best_drafts
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
from bpd_jax.drafting.refiners.transitions import Transitions, over_lattice
from bpd_jax.drafting.refiners.weights import WeightedParams
from bpd_jax.drafting.searches.beam_search import NORMALISE, BeamSearch
from bpd_jax.drafting.searches.finite import best_paths, normalised_transitions
from bpd_jax.drafting.searches.growth import LatticeSearch
from bpd_jax.models import cpu

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
    on_host = cpu.on_cpu() and importlib.util.find_spec("numba")
    return VITERBI if on_host else DEVICE
