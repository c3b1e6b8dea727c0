"""Assets of drafting methods: n-grams, small models, refiners and drafters."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Path, Validated
from bpd_jax.base.typing import Params
from bpd_jax.models.attachment_files import LoadedRefiner, check_fits
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_functions import DrafterFunctions, markov_refiner
from bpd_jax.models.model import Model
from bpd_jax.ngrams.model import NGramModel

if TYPE_CHECKING:
    from bpd_jax.models.eagle import EagleFunctions

SMALL_LMS = ("rescorer", "draft_model")

Accuracies = tuple[tuple[float, ...], ...]
"""`[j][r]`: the share of right candidates of rank r of head j + 2; see `Assets`."""


def read_accuracies(facts: Mapping[str, Any], path: object) -> Accuracies | None:
    """The entry `accuracies` of the JSON file at `path`; None if there is none."""
    accuracies = facts.get("accuracies")
    try:
        if accuracies is None:
            return None
        return tuple(tuple(float(share) for share in head) for head in accuracies)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{path} has no valid accuracies of heads ({error}): run bpd_jax.tune, or "
            "train the heads, again."
        ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class AttachedDrafter:
    """A block drafter, ready to draft for the model that it was trained on.

    Attributes:
      functions: functions of the drafter; in a replay `decoding.recorded_drafter`
        implements those that drafting calls.
      feature_layers: layers of the model whose outputs it reads.
      markov: its Markov head as a refiner of lattices; None without one.
    """

    functions: DrafterFunctions
    params: Params
    feature_layers: tuple[int, ...]
    markov: Params | None = None

    @classmethod
    def of(cls, functions: DrafterFunctions, params: Params) -> "AttachedDrafter":
        """Attaches a drafter with the layers and the Markov head of its functions."""
        markov = None
        if functions.config.markov_rank:
            markov = markov_refiner(functions, params)[1]
        return cls(functions, params, functions.config.feature_layers, markov)


@dataclasses.dataclass(frozen=True, eq=False)
class AttachedEagle:
    """An EAGLE-3 drafter, ready to draft for its model."""

    functions: "EagleFunctions"
    params: Params


def on_mesh(asset: Any, mesh: Mesh | None) -> Any:
    """An asset whose cache, if it has one, is spread over a mesh like the model's."""
    if mesh is None or not isinstance(asset, Model | AttachedDrafter | AttachedEagle):
        return asset
    if isinstance(asset, Model):
        return dataclasses.replace(asset, mesh=mesh)
    functions: Any = dataclasses.replace(asset.functions, mesh=mesh)
    return dataclasses.replace(asset, functions=functions)


class OnUse:
    """A field of a dataclass that a function may make when it is first read.

    It is given as the value itself or as a `functools.partial`.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return None  # The default of the field.
        value = vars(instance)[self._name]
        if isinstance(value, functools.partial):
            value = vars(instance)[self._name] = value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value


@dataclasses.dataclass(frozen=True, eq=False)
class Assets:
    """The assets that are available to drafting methods; None for those that are not.

    Attributes:
      ngram: an n-gram model over the model's tokens.
      rescorer: a small LM over the same tokens, for the refiner neural.
      draft_model: a small LM over the same tokens, for the source draft_model.
      markov: a refiner trained for this model.
      drafter: a block drafter trained for this model.
      eagle: an EAGLE-3 drafter of this model.
      accuracies: `accuracies[j][r]` is the share of right candidates of rank r of head
        j + 2, from which the shape of a static tree is chosen.
      same_tokens: whether the small LMs are known to have the model's tokens; then
        their numbers of rows may differ, because some rows have no token.
    """

    ngram: NGramModel | None = None
    rescorer: OnUse = OnUse()
    draft_model: OnUse = OnUse()
    markov: LoadedRefiner | None = None
    drafter: AttachedDrafter | None = None
    eagle: AttachedEagle | None = None
    accuracies: Accuracies | None = None
    same_tokens: bool = False

    def check(self, model: BlockwiseConfig) -> None:
        """Checks that n-grams, small language models and refiners fit the model."""
        vocab_size = model.trunk.vocab_size
        sizes = {}
        if self.ngram is not None:
            sizes["n-gram model"] = self.ngram.vocab_size
        # One of the same tokenizer may have another number of rows.
        for name in () if self.same_tokens else SMALL_LMS:
            small: Model | None = getattr(self, name)
            if small is not None:
                sizes[name.replace("_", " ")] = small.config.trunk.vocab_size
        for name, size in sizes.items():
            if size != vocab_size:
                raise UserError(
                    f"the {name} has {size} tokens and the language model "
                    f"{vocab_size}: make it with the language model's tokenizer "
                    "(build_ngram --vocabulary=RUN_FOLDER, or train on the same task)."
                )
        if self.markov is not None:
            check_fits(
                self.markov.config,
                vocab_size=vocab_size,
                d_model=model.trunk.d_model,
                block_size=model.block_size,
            )

    def need(self, name: str, method: str) -> Any:
        """Returns an asset that a method requires."""
        asset = getattr(self, name)
        if asset is None:
            raise UserError(f"method {method} needs {HOW_TO_MAKE[name]}")
        return asset


# The assets by name, with the end of the sentence "method … needs".
HOW_TO_MAKE = {
    "ngram": "an n-gram model: build one with python -m bpd_jax.build_ngram and pass "
    "its folder as --ngram.",
    "rescorer": "a small language model: train one on the same tokens with python -m "
    "bpd_jax.train and pass its run folder as --rescorer.",
    "draft_model": "a smaller language model: train one on the same tokens with python "
    "-m bpd_jax.train and pass its run folder as --draft_model.",
    "markov": "a trained Markov refiner: train one with python -m bpd_jax.train and "
    "gin_configs/runs/refiner.gin, and pass the folder markov of its run folder as "
    "--markov.",
    "drafter": "a block drafter: train one with python -m bpd_jax.train and a "
    "drafter's gin file (docs/pretrained.md), and pass its folder as --drafter.",
    "eagle": "a published EAGLE-3 drafter of the model: pass its folder as --eagle.",
}


@dataclasses.dataclass(frozen=True)
class AssetPaths(Validated):
    """Paths of assets by their names; None for those in the model's folder.

    Attributes:
      ngram: folder of an n-gram model, or an ARPA file with token ids. Default
        of this and the following flags: that of the model's folder.
      rescorer: run folder of a small LM, for the refiner neural.
      draft_model: run folder of a smaller LM, for draft_model.
      markov: folder of a Markov refiner.
      drafter: folder of a block drafter, for the source block: trained here, or
        published (dflash or dspark of speculators, z-lab, DeepSpec).
      eagle: folder of a published EAGLE-3 drafter, for the source eagle.
    """

    ngram: Path | None = None
    rescorer: Path | None = None
    draft_model: Path | None = None
    markov: Path | None = None
    drafter: Path | None = None
    eagle: Path | None = None


assert [field.name for field in dataclasses.fields(AssetPaths)] == list(HOW_TO_MAKE)
