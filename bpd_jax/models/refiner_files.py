"""A refiner on disk: a folder with `refiner.json` and `params.npz`."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import ArraySpec, read_npz
from bpd_jax.base.typing import Params
from bpd_jax.models.attachments import by_path, check_finite
from bpd_jax.models.trained_refiners import REFINER_KINDS, RefinerConfig
from bpd_jax.storage import files
from bpd_jax.storage.folders import Artifact, replacing_folder
from bpd_jax.storage.paths import as_path, local_copy

HEADER, PARAMETERS = "refiner.json", "params.npz"
KIND = Artifact(
    "a refiner",
    HEADER,
    # The folder may contain the log of its training.
    (PARAMETERS, "metrics.jsonl"),
    '"config"',
    remedy="train one with python -m bpd_jax.train_refiner",
)


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedRefiner:
    """A trained refiner.

    Attributes:
      facts: settings and results of its training, as JSON.
      base: fingerprint of the model that it was trained on (`attachments`), or None if
        unknown.
    """

    config: RefinerConfig
    params: Params
    facts: dict[str, Any]
    base: str | None = None

    @property
    def kind(self) -> str:
        """`markov`, `recurrent` or `hydra`."""
        return self.config.kind


def save_refiner(
    folder: str | os.PathLike[str],
    config: RefinerConfig,
    params: Params,
    facts: Mapping[str, Any],
    base: str | None = None,
) -> None:
    """Writes a refiner atomically; for `facts` and `base` see `LoadedRefiner`."""
    header = {
        "kind": config.kind,
        "base": base,
        "config": dataclasses.asdict(config),
        "facts": dict(facts),
    }
    with replacing_folder(folder, KIND) as temporary:
        files.write_npz(temporary / PARAMETERS, jax.device_get(by_path(params)))
        KIND.write_header(temporary, header)


def load_refiner(folder: str | os.PathLike[str]) -> LoadedRefiner:
    """Reads what `save_refiner` wrote."""
    folder = as_path(folder)
    header = KIND.read_header(folder, {"kind": str, "config": dict, "facts": dict})
    with KIND.reading(folder / HEADER):
        config = REFINER_KINDS[header["kind"]](**header["config"])
    path = folder / PARAMETERS
    with KIND.reading(path):
        key = jax.eval_shape(lambda: jax.random.key(0))
        abstract = jax.eval_shape(config.init, key)
        specs = {
            name: ArraySpec((np.dtype(leaf.dtype).str,), tuple(leaf.shape))
            for name, leaf in by_path(abstract).items()
        }
        arrays = read_npz(local_copy(path), specs)
    check_finite(arrays, path)
    leaves = [jnp.asarray(arrays[name]) for name in specs]
    params = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    return LoadedRefiner(config, params, header["facts"], header.get("base"))


def check_fits(
    config: RefinerConfig, *, vocab_size: int, d_model: int, block_size: int
) -> None:
    """Raises a `UserError` unless the refiner fits a model of these sizes."""
    trained_sizes = (config.vocab_size, config.d_model, config.num_heads)
    if trained_sizes == (vocab_size, d_model, block_size):
        return

    def sizes(vocab_size: int, d_model: int, block_size: int) -> str:
        return f"{vocab_size} tokens, width {d_model} and {block_size} heads"

    raise UserError(
        f"the {config.kind} refiner belongs to a model of {sizes(*trained_sizes)}, and "
        f"this model has {sizes(vocab_size, d_model, block_size)}: train one for it "
        f"with python -m bpd_jax.train_refiner --model=RUN --kind={config.kind}."
    )
