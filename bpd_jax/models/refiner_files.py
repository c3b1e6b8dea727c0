"""A refiner on disk: a folder with `refiner.json` and `params.npz`."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax import array_files, files, folders
from bpd_jax.errors import UserError
from bpd_jax.models.refiners import KINDS, RefinerConfig, init_refiner
from bpd_jax.typing import Params

FORMAT = 1
HEADER, PARAMETERS = "refiner.json", "params.npz"
KIND = folders.FolderKind("a refiner", HEADER, (PARAMETERS,), '"config"')


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedRefiner:
    """A trained refiner.

    Attributes:
      config: its sizes.
      params: its parameters.
      facts: how it was trained: what JSON can hold.
      base: `heads_files.fingerprint` of the model that it was trained on; None where
        nobody kept it.
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
    """Writes the refiner; the folder appears as a whole or not at all.

    Args:
      folder: to write; an older one is replaced.
      config: sizes.
      params: of the refiner.
      facts: see `LoadedRefiner`.
      base: likewise.
    """
    about = {
        "format": FORMAT,
        "kind": config.kind,
        "base": base,
        "config": dataclasses.asdict(config),
        "facts": dict(facts),
    }
    arrays: dict[str, Any] = jax.device_get(_named(params))
    with folders.replacing_folder(folder, KIND) as temporary:
        np.savez(temporary / PARAMETERS, **arrays)
        text = json.dumps(about, indent=2) + "\n"
        (temporary / HEADER).write_text(text, encoding="utf-8")


def load_refiner(folder: str | os.PathLike[str]) -> LoadedRefiner:
    """Reads what `save_refiner` wrote.

    Raises:
      UserError: the folder is missing, damaged, or no refiner.
    """
    folder = pathlib.Path(folder)
    config, facts, base = _read_header(folder / HEADER)
    abstract = jax.eval_shape(functools.partial(init_refiner, config), _KEY)
    path = folder / PARAMETERS
    wanted = _named(abstract)
    specs = {name: array_files.spec_like(leaf) for name, leaf in wanted.items()}
    try:
        arrays = array_files.read_npz(path, specs)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {path}, or it does not fit {HEADER} ({error}): {_REMEDY}."
        ) from error
    leaves = [jnp.asarray(arrays[name]) for name in wanted]
    params = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    return LoadedRefiner(config, params, facts, base)


def check_fits(
    config: RefinerConfig, *, vocab_size: int, d_model: int, block_size: int
) -> None:
    """Raises a `UserError` unless the refiner is one for a model of these sizes."""
    theirs = (config.vocab_size, config.d_model, config.num_heads)
    if theirs == (vocab_size, d_model, block_size):
        return

    def sizes(vocab_size: int, d_model: int, block_size: int) -> str:
        return f"{vocab_size} tokens, width {d_model} and {block_size} heads"

    raise UserError(
        f"the {config.kind} refiner belongs to a model of {sizes(*theirs)}, and this "
        f"one has {sizes(vocab_size, d_model, block_size)}: train one for it with "
        f"python -m bpd_jax.train_refiner --model=RUN --kind={config.kind}."
    )


_REMEDY = "train it again with python -m bpd_jax.train_refiner"
_KEY = jax.eval_shape(lambda: jax.random.key(0))


def _read_header(
    path: pathlib.Path,
) -> tuple[RefinerConfig, dict[str, Any], str | None]:
    """Sizes, facts and base of a refiner."""
    try:
        about = files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path.parent} holds no refiner: {path} is missing; train one with python "
            "-m bpd_jax.train_refiner."
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}): {_REMEDY}.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise UserError(f"{path} is not of format {FORMAT}: {_REMEDY}.")
    try:
        config = KINDS[about["kind"]](**about["config"])
        return config, dict(about["facts"]), about.get("base")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} describes no refiner ({error}): {_REMEDY}.") from error


def _named(params: Params) -> dict[str, Any]:
    """Leaves by the path of their keys, such as `level_1/kernel_in`, in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(entry.key for entry in path): leaf for path, leaf in leaves}
