"""From a method's name to a drafter: which parts make up which method."""

from bpd_jax.decoding.assets import Assets
from bpd_jax.decoding.methods import KINDS, Method
from bpd_jax.drafting.drafters.autoregressive import AutoregressiveDrafter
from bpd_jax.drafting.drafters.blockwise import BlockwiseDrafter
from bpd_jax.drafting.drafters.oracle import OracleDrafter
from bpd_jax.drafting.drafters.paths import PathDrafter, Search
from bpd_jax.drafting.interface import Drafter
from bpd_jax.drafting.paths.interface import PathModel
from bpd_jax.drafting.paths.lattice import LatticePaths
from bpd_jax.drafting.rescorers.device import DeviceRescorer
from bpd_jax.drafting.rescorers.fst import FstRescorer
from bpd_jax.drafting.rescorers.viterbi import ViterbiRescorer
from bpd_jax.drafting.searches.beam import Beam
from bpd_jax.drafting.searches.best_first import BestFirst
from bpd_jax.drafting.searches.exact import ExactBest
from bpd_jax.drafting.searches.topology import StaticTree, expected_tree
from bpd_jax.drafting.transitions.ngram import NGramScorer, ngram_arrays
from bpd_jax.errors import UserError
from bpd_jax.models.functions import ModelFunctions

_Engine = DeviceRescorer | ViterbiRescorer | FstRescorer

# How often the candidate of rank r is right, where nothing was measured: chances of
# head j + 2 are these to the power of sqrt(j + 1). They only choose a tree's shape.
_TYPICAL_ACCURACIES = (0.5, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01)


class Assembly:
    """Makes drafters and keeps what several of them share."""

    def __init__(
        self,
        model: ModelFunctions,
        assets: Assets,
        *,
        width: int,
        alpha: float,
        engine: str,
    ) -> None:
        """Takes the defaults of methods that leave a setting open; see `Decoder`."""
        self._model, self._assets = model, assets
        self._width, self._alpha, self._engine = width, alpha, engine
        self._engines: dict[tuple[str, float, float], _Engine] = {}

    def drafter(self, method: Method, temperature: float | None) -> Drafter:
        """Makes a drafter.

        Args:
          method: what to draft.
          temperature: of drawn drafts, for speculative sampling; None draws nothing.

        Raises:
          UserError: the method asks for something that is not there.
        """
        if method.kind == "greedy":
            return AutoregressiveDrafter()
        block, width = self._sizes(method)
        if method.kind == "oracle":
            return OracleDrafter(block, width)
        if method.kind.startswith("ngram_") or self._plain_ngram(method):
            engine = self._engine if method.kind == "ngram" else method.kind
            if engine != "ngram_device" or self._plain_ngram(method):
                return BlockwiseDrafter(self._rescorer(engine, method), block, width)
        paths = self._paths(method, block, width)
        return PathDrafter(paths, self._search(method, paths, temperature))

    def _sizes(self, method: Method) -> tuple[int, int]:
        """L and W.

        Raises:
          UserError: the model has no such heads, or the vocabulary not so many tokens.
        """
        block, vocab_size = self._model.block_size, self._model.config.trunk.vocab_size
        if block == 1:
            raise UserError(
                f"the model has no block heads, so method {method.name} has nothing to "
                "draft from: train heads (BlockHeadsConfig), or use greedy, "
                "prompt_lookup, lookahead or draft_model."
            )
        if method.heads is not None and not 2 <= method.heads <= block:
            raise UserError(
                f"{method.name} asks for {method.heads} heads: give 2 to {block}."
            )
        if method.k is not None and method.k > vocab_size:
            raise UserError(
                f"{method.name} asks for {method.k} candidates, but the vocabulary has "
                f"{vocab_size} tokens."
            )
        width = 1 if method.kind == "bpd" else method.k or self._width
        block = method.heads or block
        if method.kind != "bpd" and "P" in _size_of(method):
            paths = width ** (block - 1)
            if method.count > paths:
                raise UserError(
                    f"{method.name} asks for {method.count} drafts, but the lattice of "
                    f"{block} heads and {width} candidates has {paths} paths."
                )
        return block, width

    def _plain_ngram(self, method: Method) -> bool:
        """Whether an n-gram engine does all that the method asks for."""
        search = method.search in (None, "exact")
        return (
            method.kind in ("ngram", "ngram_device") and search and not method.adaptive
        )

    def _rescorer(self, engine: str, method: Method) -> _Engine:
        ngram = self._assets.need("ngram", method.name)
        alpha = self._alpha if method.alpha is None else method.alpha
        slope = method.slope or 0.0
        # Methods that differ in P alone share the tables.
        key = (engine, alpha, slope)
        if key not in self._engines:
            if engine == "ngram_device":
                made: _Engine = DeviceRescorer.from_model(
                    ngram, 1, alpha, alpha_slope=slope
                )
            elif engine == "ngram_viterbi":
                made = ViterbiRescorer(ngram, 1, alpha, alpha_slope=slope)
            else:
                exact = engine == "ngram_fst_exact"
                made = FstRescorer(ngram, 1, alpha, exact=exact)
            self._engines[key] = made
        return self._engines[key].with_drafts(method.count)

    def _paths(self, method: Method, block: int, width: int) -> PathModel:
        if method.kind in ("ngram", "ngram_device", "medusa_ngram"):
            alpha = self._alpha if method.alpha is None else method.alpha
            ngram = self._assets.need("ngram", method.name)
            arrays = ngram_arrays(ngram, alpha, method.slope or 0.0)
            scorer = NGramScorer(arrays, adaptive=bool(method.adaptive))
            return LatticePaths(block, width, scorer)
        return LatticePaths(block, width)

    def _search(
        self, method: Method, paths: PathModel, temperature: float | None
    ) -> Search:
        tree = method.kind.startswith("medusa")
        default = "static" if tree else "exact"
        if not isinstance(paths, LatticePaths):
            default = "static" if tree else "beam"
        search = method.search or default
        if search == "greedy":
            return Beam(1)
        if search == "beam":
            return Beam(method.count)
        if search == "best":
            return BestFirst(method.count)
        if search == "static":
            accuracies = self._assets.accuracies or typical_accuracies(paths.block_size)
            return StaticTree(expected_tree(accuracies, method.count), temperature)
        if not isinstance(paths, LatticePaths):
            raise UserError(
                f"{method.name}: the exact search needs a second opinion with finitely "
                "many states; use search=beam."
            )
        return ExactBest(method.count)


def typical_accuracies(block_size: int) -> tuple[tuple[float, ...], ...]:
    """Chances by head and rank, for a tree where nothing was measured."""
    return tuple(
        tuple(chance ** ((head + 1) ** 0.5) for chance in _TYPICAL_ACCURACIES)
        for head in range(block_size - 1)
    )


def _size_of(method: Method) -> str:
    return KINDS[method.kind].size
