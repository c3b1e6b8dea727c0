"""What runs of a training have saved."""

import os
import pathlib

import jax

from bpd_jax.base.typing import Params
from bpd_jax.models.blockwise_config import load_config
from bpd_jax.training.checkpoints import load_parameters


def parameters(run: str | os.PathLike[str], step: int | None = None) -> Params:
    """The parameters of a step, by default the newest, as host arrays."""
    folder = pathlib.Path(run)
    model = load_config(folder / "model.json")
    return jax.device_get(load_parameters(folder / "checkpoints", model, step))
