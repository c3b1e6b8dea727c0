"""What runs of a training have saved, and comparisons of it."""

import dataclasses
import functools
import os
import pathlib
from typing import Any

import jax
import numpy as np

from bpd_jax.base.typing import Params
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.config_files import load_config
from bpd_jax.storage.paths import as_path
from bpd_jax.training.checkpoints import load_parameters
from bpd_jax.training.metrics import FILE_NAME, read_rows


def parameters(run: str | os.PathLike[str], step: int | None = None) -> Params:
    """The parameters of a step, by default the newest, as host arrays."""
    folder = pathlib.Path(run)
    model = load_config(folder / "model.json")
    return jax.device_get(load_parameters(folder / "checkpoints", model, step))


def with_trunk(model: BlockwiseConfig, **changes: Any) -> BlockwiseConfig:
    """The model with other settings of its trunk."""
    trunk = dataclasses.replace(model.trunk, **changes)
    return dataclasses.replace(model, trunk=trunk)


def assert_close(left: Any, right: Any, rtol: float, atol: float) -> None:
    """Compares all arrays of two trees."""
    compare = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(compare, left, right)


def logged(run: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The rows of the log without speeds, which differ from run to run."""
    return [
        {name: value for name, value in row.items() if "per_second" not in name}
        for row in read_rows(as_path(run) / FILE_NAME)
    ]
