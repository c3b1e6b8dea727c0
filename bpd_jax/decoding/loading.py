"""From a name on the command line to a model that decodes."""

import dataclasses
import json
import os
import pathlib

import numpy as np

from bpd_jax.data.prompts import held_out_prompts
from bpd_jax.data.spec import TextTask
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.errors import UserError
from bpd_jax.models.config import load_config
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.training.checkpoints import load_parameters
from bpd_jax.typing import Params

# Names that `--model` knows, and where `make` puts them.
KNOWN_MODELS = {"demo": "runs/demo"}

NGRAM_FOLDER = "ngram"


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


def load_task(path: str | os.PathLike[str]) -> TextTask:
    """Reads the task that a run folder keeps as JSON."""
    try:
        fields = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        return TextTask(**fields)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: is this a run folder?") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} does not describe a text task: {error}.") from error
