"""Loading of run folders, and of their held-out prompts."""

import os
import pathlib

import numpy as np
from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.data.example_task import DataTask, task_from_json
from bpd_jax.data.held_out import held_out_prompts
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.decoding.loaded_model import LoadedModel
from bpd_jax.models.blockwise_config import load_config
from bpd_jax.models.model import Model
from bpd_jax.storage import files
from bpd_jax.training.exported_params import load_run_parameters, selected_step
from bpd_jax.training.run_names import CHECKPOINTS, whole_steps


def load_run(folder: pathlib.Path, mesh: Mesh | None) -> LoadedModel:
    """Loads the model of a run folder, or of one of its checkpoints."""
    if folder.parent.name == "checkpoints" and folder.name.isdigit():
        step: int | None = int(folder.name)
        folder = folder.parent.parent
    else:
        step = selected_step(folder)
    config = load_config(folder / "model.json")
    tokenizer = Tokenizer.load(folder)
    return LoadedModel(
        name=folder.name,
        folder=folder,
        model=Model(config, load_run_parameters(folder, config, step, mesh), mesh=mesh),
        tokenizer=tokenizer,
        end_tokens=(tokenizer.end_of_text,),
        task=load_task(folder / "task.json"),
        begin_of_text=tokenizer.end_of_text,
        asset_folders=(folder,),
        step=step or max(whole_steps(folder / CHECKPOINTS), default=None),
    )


def load_task(path: str | os.PathLike[str]) -> DataTask:
    """Reads the task of a run folder from its JSON file."""
    try:
        return task_from_json(files.read_json(path))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: is this a run folder?") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} does not describe a task: {error}.") from error


def held_out(loaded: LoadedModel, count: int, length: int) -> list[np.ndarray]:
    """Held-out prompts: the first `length` tokens of `count` documents.

    For a model that was trained on examples, inputs of at most `length` tokens.
    """
    if loaded.task is None:
        raise UserError(
            f"{loaded.name} is a pretrained model without held-out text: give "
            "--prompts_file."
        )
    prompts = held_out_prompts(loaded.task, count, length, loaded.tokenizer)
    return [prompt.tokens for prompt in prompts]
