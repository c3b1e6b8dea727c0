"""What drafting methods need besides the model, from folders."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from bpd_jax import files
from bpd_jax.buckets import as_path
from bpd_jax.decoding.loading import LoadedModel, load_model
from bpd_jax.drafting.assets import KINDS, Assets, AttachedDrafter, SmallModel
from bpd_jax.errors import UserError
from bpd_jax.models.drafter_files import (
    HEADER,
    LoadedDrafter,
    attach_drafter,
    load_drafter,
)
from bpd_jax.models.drafter_functions import DrafterFunctions, with_softmax
from bpd_jax.models.heads import softmax_rows
from bpd_jax.models.products import decoding_layout
from bpd_jax.models.refiner_files import LoadedRefiner, check_fits, load_refiner
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.pretrained.safetensors_files import CONFIG

# What `bpd_jax.tune` found out about a model.
TUNING = "drafting.json"

# What a model's folder may hold for its own drafting, by the name of the asset.
OWN_ASSETS = {name: kind.folder for name, kind in KINDS.items()}


def load_assets(
    loaded: LoadedModel, given: Mapping[str, str | None] | None = None
) -> Assets:
    """Loads what there is to draft with.

    Args:
      loaded: the model.
      given: folders (of an n-gram model also a file) by the names of `OWN_ASSETS`;
        what is not given is taken from the model's own folders, if it is there (and,
        of refiners, if it was trained on this very model).

    Raises:
      UserError: something is missing, damaged or made for another model.
    """
    found: dict[str, Any] = {}
    for name, own in OWN_ASSETS.items():
        path = (given or {}).get(name)
        place = loaded.own(own) if path is None else path
        if place is None:
            continue
        asset = _load_asset(loaded, name, str(place))
        if isinstance(asset, LoadedRefiner) and not _trained_on(loaded, asset):
            # The run's earlier checkpoints decode too, without refiners of the last.
            if path is not None:
                raise UserError(
                    f"the {name} refiner in {path} was trained on another model than "
                    f"{loaded.name}: train one for it with python -m "
                    f"bpd_jax.train_refiner --kind={name}."
                )
            continue
        found[name] = asset
    if "drafter" not in found and loaded.functions.config.drafter is not None:
        found["drafter"] = _trained_along(loaded)
    tuning = own_tuning(loaded)
    accuracies = None if tuning is None else load_accuracies(tuning)
    return Assets(**found, accuracies=accuracies or loaded.accuracies)


def _trained_along(loaded: LoadedModel) -> AttachedDrafter:
    """The block drafter that was trained together with the model."""
    config, params = loaded.functions.config, loaded.params
    assert config.drafter is not None
    functions = DrafterFunctions(config.drafter.resolve(config.trunk), config.trunk)
    softmax = softmax_rows(config, params, None)
    return AttachedDrafter.of(
        functions, decoding_layout(with_softmax(params["drafter"], softmax, None))
    )


def own_tuning(loaded: LoadedModel) -> pathlib.Path | None:
    """The model's own `drafting.json`, if it was written with the heads it has now.

    Raises:
      UserError: such a file is damaged.
    """
    for shelf in loaded.shelves:
        path = shelf / TUNING
        try:
            facts = files.read_json(path)
            if facts.get("heads") == loaded.heads_identity:
                return path
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(
                f"cannot read {path} ({error}): run bpd_jax.tune again."
            ) from error
    return None


def _trained_on(loaded: LoadedModel, refiner: LoadedRefiner) -> bool:
    """Whether it belongs to this very model, as far as it says to which."""
    if refiner.base is None:
        return True
    return refiner.base == loaded.fingerprint


def _load_asset(
    loaded: LoadedModel, name: str, path: str
) -> NGramModel | SmallModel | object:
    if name == "ngram":
        from bpd_jax.ngrams.formats import load_model as ngram_files

        return ngram_files.load_model(
            path,
            vocab_size=loaded.vocab_size,
            end_of_text=loaded.tokenizer.end_of_text,
        )
    config = loaded.functions.config
    if name == "drafter":
        drafter = read_drafter(loaded, path)
        functions, params = attach_drafter(
            config, loaded.params, drafter, name=loaded.name
        )
        return AttachedDrafter.of(functions, decoding_layout(params))
    if name in ("markov", "recurrent", "hydra"):
        refiner = load_refiner(path)
        if refiner.kind != name:
            raise UserError(f"{path} holds a {refiner.kind} refiner, not a {name} one.")
        check_fits(
            refiner.config,
            vocab_size=config.trunk.vocab_size,
            d_model=config.trunk.d_model,
            block_size=config.block_size,
        )
        return refiner
    small = load_model(path)
    if small.tokenizer.to_json() != loaded.tokenizer.to_json():
        raise UserError(
            f"{path} has another tokenizer than {loaded.name}: train it on the same "
            "task, with the same vocabulary."
        )
    return SmallModel(small.functions, small.params)


def read_drafter(loaded: LoadedModel, folder: str | os.PathLike[str]) -> LoadedDrafter:
    """Reads a block drafter of a model: one of ours, or a published one.

    Raises:
      UserError: the folder is missing, damaged, or holds no such drafter.
    """
    folder = as_path(folder)
    if (folder / CONFIG).is_file() and not (folder / HEADER).is_file():
        from bpd_jax.pretrained.drafter_import import import_drafter

        return import_drafter(
            folder, loaded.functions.config, loaded.params, name=loaded.name
        )
    return load_drafter(folder)


def load_accuracies(
    path: str | os.PathLike[str],
) -> tuple[tuple[float, ...], ...] | None:
    """Reads how often each head's candidates are right; None if nobody measured it."""
    try:
        return tuple(
            tuple(float(chance) for chance in head)
            for head in files.read_json(path)["accuracies"]
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} does not hold head accuracies: {error}; run bpd_jax.tune again."
        ) from error
