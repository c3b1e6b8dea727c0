"""Loading of the assets of drafting methods from folders."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from bpd_jax.base.errors import UserError, naming
from bpd_jax.base.typing import Params
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.loading import load_model
from bpd_jax.decoding.pretrained_checkpoint import other_formats
from bpd_jax.drafting.assets import (
    HOW_TO_MAKE,
    SMALL_LMS,
    Assets,
    AttachedDrafter,
    AttachedEagle,
    read_accuracies,
)
from bpd_jax.models.attachment_files import (
    DRAFTER_KIND,
    LoadedDrafter,
    LoadedRefiner,
    attach_drafter,
    load_drafter,
    load_refiner,
)
from bpd_jax.models.attachments import by_path, check_finite
from bpd_jax.models.block_drafter import with_softmax
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.decoding_parameters import decoding_layout
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.model import Model
from bpd_jax.models.partitioning import on_host
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path
from bpd_jax.training import hosts

# File with the results of `bpd_jax.tune` in a model's folder, and the version of its
# format, which earlier files do not state.
TUNING, TUNING_FORMAT = "drafting.json", 1

# Folders of assets in a model's folder, by the name of the asset.
ASSET_FOLDERS = {name: name for name in HOW_TO_MAKE} | {"markov": "refiners/markov"}


def with_assets(
    loaded: LanguageModel, paths: Mapping[str, str | None] | None = None
) -> LanguageModel:
    """The model with the assets of its methods; see `load_assets`."""
    return dataclasses.replace(loaded, assets=load_assets(loaded, paths))


def load_assets(
    loaded: LanguageModel, paths: Mapping[str, str | None] | None = None
) -> Assets:
    """Loads the assets of a model.

    Args:
      paths: folders (or the file of an n-gram model) by the names of `ASSET_FOLDERS`.
        Other assets are loaded from the model's folders if they exist, small LMs when a
        method reads them, and a refiner only if it was trained for this model.
    """
    assets: dict[str, Any] = {}
    for name, folder in ASSET_FOLDERS.items():
        path = (paths or {}).get(name)
        source = loaded.find_asset(folder) if path is None else path
        if source is None:
            continue
        if name in SMALL_LMS:
            # Holds the tokenizer, not the parameters in the layout of the file.
            tokenizer = loaded.tokenizer
            small = functools.partial(_load_small, str(source), tokenizer, loaded.name)
            assets[name] = small if path is None else small()
            continue
        asset = _load_asset(loaded, name, str(source))
        base = asset.base if isinstance(asset, LoadedRefiner) else None
        if base is not None and base != loaded.fingerprint:
            # A refiner of the last checkpoint is ignored for earlier checkpoints.
            if path is not None:
                raise UserError(
                    f"the {name} refiner in {path} was trained on another model than "
                    f"{loaded.name}: train one for it with python -m bpd_jax.train and "
                    "gin_configs/runs/refiner.gin."
                )
            continue
        assets[name] = asset
    config, params = loaded.config, loaded.params
    if "drafter" not in assets and isinstance(config.drafter, BlockDrafterConfig):
        # It was trained together with the model.
        functions = DrafterFunctions(config.drafter.resolve(config.trunk), config.trunk)
        softmax = softmax_rows(config, params, None)
        drafter = with_softmax(params["drafter"], softmax, None)
        drafter = _for_drafting(loaded, drafter)
        assets["drafter"] = AttachedDrafter.of(functions, drafter)
    accuracies = loaded.accuracies
    if (tuning := find_tuning(loaded)) is not None:
        path, facts = tuning
        accuracies = read_accuracies(facts, path) or accuracies
    return Assets(**assets, accuracies=accuracies, same_tokens=True)


def find_tuning(loaded: LanguageModel) -> tuple[str, dict[str, Any]] | None:
    """Path and contents of `drafting.json` if it was written for the loaded heads.

    In all processes they are those of process 0: the method and the shape of trees,
    which depend on them, must not differ.
    """

    def find() -> tuple[str, dict[str, Any]] | None:
        for folder in loaded.asset_folders:
            path = folder / TUNING
            try:
                facts = read_tuning(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if facts.get("heads") == loaded.heads_identity:
                return str(path), facts
        return None

    return hosts.agree(hosts.first(find))


def read_tuning(path: pathlib.Path) -> dict[str, Any]:
    """The contents of a `drafting.json`, of which only the format is checked."""
    try:
        facts = files.read_json(path)
        if facts.get("format", TUNING_FORMAT) != TUNING_FORMAT:
            raise ValueError(f"it is not of format {TUNING_FORMAT}")
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"cannot read {path} ({error}): run bpd_jax.tune again."
        ) from error
    return facts


def _load_asset(loaded: LanguageModel, name: str, path: str) -> NGramModel | object:
    if name == "ngram":
        from bpd_jax.ngrams.formats import load_model as ngram_files

        ngram = ngram_files.load_model(
            path,
            vocab_size=loaded.vocab_size,
            end_of_text=loaded.tokenizer.end_of_text,
        )
        if ngram.vocab_size == loaded.vocab_size:
            return ngram
        # Rows of the model's embedding without a token may be counted or not.
        used = loaded.tokenizer.used_size
        if ngram.vocab_size < used:
            raise UserError(
                f"the n-gram model {path} has {ngram.vocab_size} tokens, but the "
                f"tokenizer of {loaded.name} has {used}: build it with this tokenizer "
                "(build_ngram --vocabulary=FOLDER)."
            )
        with naming(path):
            return ngram.with_vocab_size(loaded.vocab_size)
    config = loaded.config
    if name == "drafter":
        drafter = read_drafter(loaded, path)
        functions, params = attach_drafter(
            config, loaded.params, drafter, name=loaded.name, base=loaded.fingerprint
        )
        params = _for_drafting(loaded, params)
        return AttachedDrafter.of(functions, params)
    if name == "eagle":
        read = other_formats().import_eagle
        eagle, weights = read(path, config, loaded.params, loaded.name)
        weights = _for_drafting(loaded, weights)
        return AttachedEagle(eagle, weights)
    return load_refiner(path)


def _for_drafting(loaded: LanguageModel, params: Params) -> Params:
    """The parameters of a drafter as the devices of the model read them."""
    dtype, mesh = loaded.config.trunk.dtype, loaded.model.mesh
    return decoding_layout(params, dtype, mesh, exact=False)


def _load_small(path: str, tokenizer: Tokenizer, name: str) -> Model:
    """A small LM over the tokens of the model of this name."""
    small = load_model(path)
    if not small.tokenizer.same_tokens(tokenizer):
        raise UserError(
            f"{path} has another tokenizer than {name}: train it on the same "
            "task, with the same vocabulary."
        )
    check_finite(by_path(on_host(small.params)), path)
    return small.model


def read_drafter(
    loaded: LanguageModel, folder: str | os.PathLike[str]
) -> LoadedDrafter:
    """Reads a block drafter of a model: one trained here, or a published one."""
    folder = as_path(folder)
    if (folder / DRAFTER_KIND.marker).is_file() or not other_formats().is_model(folder):
        return load_drafter(folder)
    name, base = loaded.name, loaded.fingerprint
    drafter: LoadedDrafter = other_formats().import_drafter(
        folder, loaded.config, loaded.params, name=name, base=base
    )
    return drafter
