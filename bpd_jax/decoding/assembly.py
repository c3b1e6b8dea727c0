"""From a method's name to a drafter: which parts make up which method."""

import dataclasses

from bpd_jax.decoding.assets import Assets, SmallModel
from bpd_jax.decoding.methods import DRAFTS, MOST_DRAFTS, PARALLEL, Method
from bpd_jax.drafting.drafters.autoregressive import AutoregressiveDrafter
from bpd_jax.drafting.drafters.blockwise import BlockwiseDrafter
from bpd_jax.drafting.drafters.lookahead import LookaheadDrafter
from bpd_jax.drafting.drafters.oracle import OracleDrafter
from bpd_jax.drafting.drafters.paths import PathDrafter, Search
from bpd_jax.drafting.drafters.prompt_lookup import PromptLookup
from bpd_jax.drafting.drafters.union import UnionDrafter
from bpd_jax.drafting.interface import Drafter
from bpd_jax.drafting.paths.draft_model import DraftModelPaths, parallel_chains
from bpd_jax.drafting.paths.hydra import HydraPaths
from bpd_jax.drafting.paths.interface import PathModel
from bpd_jax.drafting.paths.lattice import LatticePaths
from bpd_jax.drafting.paths.neural import NeuralScorer, ParallelNeuralPaths
from bpd_jax.drafting.paths.recurrent import RecurrentScorer
from bpd_jax.drafting.paths.refined import RefinedPaths
from bpd_jax.drafting.paths.small_lm import SmallLM
from bpd_jax.drafting.rescorers.device import DeviceRescorer
from bpd_jax.drafting.rescorers.fst import FstRescorer
from bpd_jax.drafting.rescorers.viterbi import ViterbiRescorer
from bpd_jax.drafting.searches.beam import Beam
from bpd_jax.drafting.searches.best_first import BestFirst
from bpd_jax.drafting.searches.exact import ExactBest
from bpd_jax.drafting.searches.topology import StaticTree, expected_tree
from bpd_jax.drafting.transitions.interface import Weight
from bpd_jax.drafting.transitions.markov import MarkovArrays, MarkovScorer
from bpd_jax.drafting.transitions.ngram import NGramScorer, ngram_arrays
from bpd_jax.errors import UserError
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.models.refiner_files import LoadedRefiner, check_fits
from bpd_jax.models.refiners import HydraConfig

_Engine = DeviceRescorer | ViterbiRescorer | FstRescorer

# Tokens kept of the draft model's distributions, where a method names no number.
_DRAFT_MODEL_WIDTH = 16

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
        self._vocab_size = model.config.trunk.vocab_size
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
        if method.kind == "auto":
            raise UserError(
                "auto is no method of its own here: name the methods, or let decode or "
                "generate measure which one it is (choose_method)."
            )
        if method.lookup is None:
            return self._alone(method, temperature)
        alone = dataclasses.replace(method, lookup=None)
        first = self._alone(alone, temperature, reach=method.lookup + 1)
        if isinstance(first, PathDrafter) and first.search.draws:
            raise UserError(
                f"{method.name}: drafts drawn for speculative sampling cannot share a "
                "tree with prompt lookup; leave out lookup, or use exact acceptance or "
                "search=best."
            )
        return UnionDrafter(first, PromptLookup(method.lookup))

    def _alone(
        self, method: Method, temperature: float | None, reach: int = 1
    ) -> Drafter:
        """A drafter of its own, where others' drafts have up to `reach` tokens."""
        if method.kind == "greedy":
            return AutoregressiveDrafter()
        if method.kind == "prompt_lookup":
            return PromptLookup(method.count, method.match or 3)
        if method.kind == "lookahead":
            return _lookahead(method)
        block, width = self._sizes(method)
        if method.kind == "oracle":
            return OracleDrafter(block, width)
        if method.kind.startswith("ngram_") or self._plain_ngram(method):
            engine = self._engine if method.kind == "ngram" else method.kind
            if engine != "ngram_device" or self._plain_ngram(method):
                return BlockwiseDrafter(self._rescorer(engine, method), block, width)
        paths = self._paths(method, block, width, max(block, reach))
        return PathDrafter(paths, self._search(method, paths, temperature))

    def small_model(self, method: Method) -> SmallModel | None:
        """The small LM that reads the text along with the model, if there is one."""
        return {
            "neural": self._assets.rescorer,
            "medusa_neural": self._assets.rescorer,
            "neural_ngram": self._assets.rescorer,
            "draft_model": self._assets.draft_model,
        }.get(method.kind)

    def _sizes(self, method: Method) -> tuple[int, int]:
        """L and W.

        Raises:
          UserError: the model has no such heads, or the vocabulary not so many tokens.
        """
        block, choices = self._model.block_size, self._vocab_size
        if method.kind != "draft_model":
            choices = self._model.config.draft_vocab_size
        if method.k is not None and method.k > choices:
            raise UserError(
                f"{method.name} asks for {method.k} candidates, but there are only "
                f"{choices} tokens to choose from."
            )
        if method.kind == "draft_model":
            return self._draft_model_sizes(method)
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
        width = 1 if method.kind == "bpd" else method.k or self._width
        if width > choices:
            raise UserError(
                f"{method.name} would keep lattice_width = {width} candidates, but "
                f"there are only {choices} tokens to choose from: lower it, or give "
                f"the method k={choices} or less."
            )
        block = method.heads or block
        if method.counts == DRAFTS:
            paths = width ** (block - 1)
            if method.count > paths:
                raise UserError(
                    f"{method.name} asks for {method.count} drafts, but the lattice of "
                    f"{block} heads and {width} candidates has {paths} paths."
                )
        return block, width

    def _draft_model_sizes(self, method: Method) -> tuple[int, int]:
        width = method.k or min(_DRAFT_MODEL_WIDTH, self._vocab_size)
        drafts = method.drafts or 1
        if drafts > width:
            raise UserError(
                f"{method.name} asks for {drafts} drafts that begin differently, but "
                f"keeps only {width} candidates: give a larger k or fewer drafts."
            )
        if drafts * method.count > MOST_DRAFTS:
            raise UserError(
                f"{method.name} drafts {drafts * method.count} tokens in every serial "
                f"call, more than {MOST_DRAFTS}: give fewer drafts or draft tokens."
            )
        return method.count + 1, width

    def _plain_ngram(self, method: Method) -> bool:
        """Whether an n-gram engine does all that the method asks for."""
        if method.kind not in ("ngram", "ngram_device"):
            return False
        beyond = method.adaptive or method.normalise
        return method.search in (None, "exact") and not beyond

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

    def _paths(self, method: Method, block: int, width: int, reach: int) -> PathModel:
        match method.kind:
            case "bpd" | "zero_gram" | "medusa":
                return LatticePaths(block, width)
            case "ngram" | "ngram_device" | "medusa_ngram":
                alpha = self._alpha if method.alpha is None else method.alpha
                scorer = self._ngram_scorer(method, alpha, method.slope or 0.0)
                return LatticePaths(block, width, scorer, _normalise(method))
            case "neural" | "medusa_neural" | "neural_ngram":
                return self._neural_paths(method, block, width, reach)
            case "draft_model":
                small = self._assets.need("draft_model", method.name)
                reader = SmallLM(small.functions, reach)
                return DraftModelPaths(block, width, reader, small.params)
            case "markov" | "recurrent" | "hydra":
                return self._trained_paths(method, block, width)
        raise AssertionError(method.kind)

    def _neural_paths(
        self, method: Method, block: int, width: int, reach: int
    ) -> PathModel:
        """The lattice under a small LM, and under an n-gram model if asked for."""
        small = self._assets.need("rescorer", method.name)
        alpha = self._alpha if method.alpha is None else method.alpha
        weight = Weight.of(alpha, method.slope or 0.0)
        reader, params = SmallLM(small.functions, reach), small.params
        ngram = None
        if method.kind == "neural_ngram":
            beta = self._alpha if method.beta is None else method.beta
            ngram = self._ngram_scorer(method, beta)
        if method.mode == PARALLEL:
            if method.normalise:
                raise UserError(
                    f"{method.name}: with mode=parallel a score does not depend on the "
                    "path, so that normalise changes nothing: leave it out."
                )
            return ParallelNeuralPaths(
                block, width, ngram, small=reader, params=params, alpha=weight
            )
        lattice = LatticePaths(block, width, ngram)
        return RefinedPaths(lattice, NeuralScorer(reader, params), weight)

    def _trained_paths(self, method: Method, block: int, width: int) -> PathModel:
        """The lattice under a trained refiner, or the candidates of Hydra heads."""
        refiner = self._refiner(method)
        if isinstance(refiner.config, HydraConfig):
            return HydraPaths(block, width, refiner.config, refiner.params)
        # It was trained with a weight of 1, whatever suits other second opinions.
        alpha = 1.0 if method.alpha is None else method.alpha
        weight = Weight.of(alpha, method.slope or 0.0)
        if method.kind == "markov":
            arrays = MarkovArrays(weight, refiner.params)
            scorer = MarkovScorer(arrays)
            return LatticePaths(block, width, scorer, _normalise(method))
        recurrent = RecurrentScorer(refiner.params)
        return RefinedPaths(LatticePaths(block, width), recurrent, weight)

    def _ngram_scorer(
        self, method: Method, alpha: float, slope: float = 0.0
    ) -> NGramScorer:
        ngram = self._assets.need("ngram", method.name)
        arrays = ngram_arrays(ngram, alpha, slope)
        return NGramScorer(arrays, adaptive=bool(method.adaptive))

    def _refiner(self, method: Method) -> LoadedRefiner:
        refiner: LoadedRefiner = self._assets.need(method.kind, method.name)
        if refiner.kind != method.kind:
            raise UserError(
                f"{method.name} needs a {method.kind} refiner, and the one given is a "
                f"{refiner.kind} refiner: pass it as --{refiner.kind}."
            )
        check_fits(
            refiner.config,
            vocab_size=self._vocab_size,
            d_model=self._model.config.trunk.d_model,
            block_size=self._model.block_size,
        )
        return refiner

    def _search(
        self, method: Method, paths: PathModel, temperature: float | None
    ) -> Search:
        tree = method.kind.startswith("medusa")
        default = "static" if tree else "exact"
        if not isinstance(paths, LatticePaths):
            default = "static" if tree else "beam"
        count = nodes = method.count
        if method.kind == "draft_model":
            # Its size is the length of its drafts.
            count, default = method.drafts or 1, "static"
            nodes = 1 + count * method.count
        search = method.search or default
        if search in ("best", "static") and method.normalise is not None:
            raise UserError(
                f"{method.name}: trees grow by normalised scores anyway, so that "
                "normalise changes nothing: leave it out."
            )
        if search == "greedy":
            return Beam(1)
        if search == "beam":
            return Beam(count, _normalise(method))
        if search == "best":
            return BestFirst(nodes)
        if search == "static" and method.kind == "draft_model":
            return StaticTree(parallel_chains(count, method.count), temperature)
        if search == "static":
            accuracies = self._assets.accuracies or typical_accuracies(paths.block_size)
            return StaticTree(expected_tree(accuracies, method.count), temperature)
        if not isinstance(paths, LatticePaths):
            raise UserError(
                f"{method.name}: the exact search needs a second opinion with finitely "
                "many states; use search=beam."
            )
        return ExactBest(method.count)


def _normalise(method: Method) -> bool:
    """Whether scores are probabilities: by default those of trained refiners."""
    if method.normalise is None:
        return method.kind in ("markov", "recurrent")
    return bool(method.normalise)


def typical_accuracies(block_size: int) -> tuple[tuple[float, ...], ...]:
    """Chances by head and rank, for a tree where nothing was measured."""
    return tuple(
        tuple(chance ** ((head + 1) ** 0.5) for chance in _TYPICAL_ACCURACIES)
        for head in range(block_size - 1)
    )


def _lookahead(method: Method) -> LookaheadDrafter:
    drafter = LookaheadDrafter(
        window=method.count,
        order=method.order or 4,
        guesses=method.guesses or method.count,
    )
    if drafter.max_nodes > MOST_DRAFTS:
        raise UserError(
            f"{method.name} checks {drafter.max_nodes} tokens in every serial call, "
            f"more than {MOST_DRAFTS}: give a smaller window, order or number of "
            "guesses."
        )
    return drafter
