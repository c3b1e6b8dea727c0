"""From a name on the command line to a model that decodes."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from bpd_jax.data.prompts import held_out_prompts
from bpd_jax.data.spec import TextTask
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.decoding.assets import Assets, SmallModel
from bpd_jax.errors import UserError
from bpd_jax.models.config import load_config
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.models.refiner_files import check_fits, load_refiner
from bpd_jax.ngrams.formats import load as ngram_files
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.training.checkpoints import load_parameters
from bpd_jax.typing import Params

# Names that `--model` knows, and where `make` puts them.
KNOWN_MODELS = {"demo": "runs/demo"}

# What `bpd_jax.tune` found out about a model.
TUNING = "drafting.json"

# What a run folder may hold for its own drafting, by the name of the asset.
OWN_ASSETS = {
    "ngram": "ngram",
    "rescorer": "rescorer",
    "draft_model": "draft_model",
    "markov": "refiners/markov",
    "recurrent": "refiners/recurrent",
    "hydra": "refiners/hydra",
}


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A trained model, ready to decode.

    Attributes:
      folder: its run folder.
      functions: its functions.
      params: its parameters.
      tokenizer: its tokenizer.
      task: the text it was trained on.
    """

    folder: pathlib.Path
    functions: ModelFunctions
    params: Params
    tokenizer: Tokenizer
    task: TextTask

    def in_precision(self, dtype: str) -> "LoadedModel":
        """The same model with other activations and products; parameters stay."""
        config = self.functions.config
        trunk = dataclasses.replace(config.trunk, dtype=dtype)
        config = dataclasses.replace(config, trunk=trunk)
        return dataclasses.replace(self, functions=ModelFunctions(config))

    def held_out(self, count: int, length: int) -> list[np.ndarray]:
        """The beginnings of held-out documents, `count` prompts of `length` tokens."""
        prompts = held_out_prompts(self.task, count, length, tokenizer=self.tokenizer)
        return [prompt.tokens for prompt in prompts]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Ids of a prompt, int32: the text of a document from its beginning."""
        ids = [self.tokenizer.end_of_text, *self.tokenizer.encode(text)]
        return np.asarray(ids, np.int32)


def load_model(name: str) -> LoadedModel:
    """Loads a trained model.

    Args:
      name: a run folder, one of its checkpoint folders (`RUN/checkpoints/STEP`), or
        one of `KNOWN_MODELS`.

    Raises:
      UserError: there is no model, or it is damaged.
    """
    folder = pathlib.Path(KNOWN_MODELS.get(name, name))
    if not folder.is_dir():
        known = ", ".join(KNOWN_MODELS)
        hint = " (make demo trains it)" if name in KNOWN_MODELS else ""
        raise UserError(
            f"there is no model {name!r}: {folder} is not a folder{hint}; give a run "
            f"folder, one of its checkpoints, or a known name ({known})."
        )
    step = None
    if folder.parent.name == "checkpoints" and folder.name.isdigit():
        step = int(folder.name)
        folder = folder.parent.parent
    config = load_config(folder / "model.json")
    return LoadedModel(
        folder=folder,
        functions=ModelFunctions(config),
        params=load_parameters(folder / "checkpoints", config, step=step),
        tokenizer=Tokenizer.load(folder),
        task=load_task(folder / "task.json"),
    )


def load_assets(
    loaded: LoadedModel, given: Mapping[str, str | None] | None = None
) -> Assets:
    """Loads what there is to draft with.

    Args:
      loaded: the model.
      given: folders (of an n-gram model also a file) by the names of `OWN_ASSETS`;
        what is not given is taken from the run folder, if it is there.

    Raises:
      UserError: something is missing, damaged or made for another model.
    """
    found: dict[str, Any] = {}
    for name, own in OWN_ASSETS.items():
        path = (given or {}).get(name)
        if path is None and (loaded.folder / own).is_dir():
            path = str(loaded.folder / own)
        if path is not None:
            found[name] = _load_asset(loaded, name, path)
    return Assets(**found, accuracies=load_accuracies(loaded.folder / TUNING))


def _load_asset(
    loaded: LoadedModel, name: str, path: str
) -> NGramModel | SmallModel | object:
    if name == "ngram":
        return ngram_files.load_model(
            path,
            vocab_size=loaded.tokenizer.vocab_size,
            end_of_text=loaded.tokenizer.end_of_text,
        )
    config = loaded.functions.config
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
            f"{path} has another tokenizer than {loaded.folder}: train it on the same "
            "task, with the same vocabulary."
        )
    return SmallModel(small.functions, small.params)


def load_accuracies(
    path: str | os.PathLike[str],
) -> tuple[tuple[float, ...], ...] | None:
    """Reads how often each head's candidates are right; None if nobody measured it."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        return tuple(
            tuple(float(chance) for chance in head)
            for head in json.loads(text)["accuracies"]
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} does not hold head accuracies: {error}; run bpd_jax.tune again."
        ) from error


def load_task(path: str | os.PathLike[str]) -> TextTask:
    """Reads the task that a run folder keeps as JSON."""
    try:
        fields = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        return TextTask(**fields)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: is this a run folder?") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} does not describe a text task: {error}.") from error
