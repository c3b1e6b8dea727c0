"""Exported parameters: a trained model without optimizer state and checkpoints.

An exported folder contains `model.json`, `task.json` and `tokenizer.json` as the run
folder does (the last as `tokenizer.json.xz` if it is packed), `parameters.safetensors`,
whose tensors are named by their paths, such as `trunk/embedding`, and `slim.json`,
which describes them.
"""

import dataclasses
import lzma
import os
import pathlib
import shutil
import sys

import jax
import numpy as np
from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import check_shapes
from bpd_jax.base.typing import Params
from bpd_jax.data import tokenizer
from bpd_jax.models.attachments import by_path
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.config_files import load_config, save_config
from bpd_jax.models.parameters import abstract_parameters
from bpd_jax.models.partitioning import placed
from bpd_jax.models.stored_tensors import (
    SCALE,
    file_digest,
    lowered,
    raised,
    read_tensors,
    write_tensors,
)
from bpd_jax.storage import folders
from bpd_jax.storage.folders import Artifact
from bpd_jax.storage.paths import as_path, local_copy
from bpd_jax.training.run_names import CHECKPOINTS, MODEL, TASK, whole_steps

HEADER, TENSORS = "slim.json", "parameters.safetensors"

_COPIED = (MODEL, TASK)
KIND = Artifact(
    "exported parameters",
    HEADER,
    (*_COPIED, tokenizer.FILE_NAME, tokenizer.PACKED_NAME, TENSORS),
    '"sha256"',
    remedy="export them again with python -m bpd_jax.export_params",
)


def write_exported(
    run: str | os.PathLike[str],
    output: str | os.PathLike[str],
    dtype: str = "bfloat16",
    precision: str | None = None,
    packed: bool = False,
) -> int:
    """Writes the parameters of the best checkpoint of a run, atomically.

    Returns the size of the parameters in bytes.

    Args:
      output: output folder; an older export is replaced.
      dtype: stored precision, one of `STORED_DTYPES`; see `stored_tensors.lowered`.
        Loading converts to the model's `param_dtype`.
      precision: dtype of activations and products of the exported model; None for that
        of the run.
      packed: whether to compress the files without loss; `compact` always is.
    """
    run, output = as_path(run), as_path(output)
    folders.check_folder(output, KIND)
    for name in _COPIED:
        if not (run / name).is_file():
            raise UserError(f"{run / name} does not exist: is this a run folder?")
    _, vocabulary = tokenizer.read_tokenizer_file(run)
    packed = packed or dtype == "compact"
    model = load_config(run / MODEL)
    trunk = dataclasses.replace(model.trunk, dtype=precision or model.trunk.dtype)
    step = selected_step(run)
    params = jax.device_get(load_run_parameters(run, model, step))
    tensors: dict[str, np.ndarray] = {}
    for name, value in by_path(params).items():
        # A matrix is stored with a step for each index of its last axis.
        inputs = tuple(range(value.ndim - 1))
        tensors |= lowered(name, value, dtype, inputs)
    with folders.replacing_folder(output, KIND) as temporary:
        for name in _COPIED:
            shutil.copyfile(local_copy(run / name), temporary / name)
        if packed:
            vocabulary = lzma.compress(vocabulary, preset=lzma.PRESET_EXTREME | 9)
        name = tokenizer.PACKED_NAME if packed else tokenizer.FILE_NAME
        (temporary / name).write_bytes(vocabulary)
        written = dataclasses.replace(model, trunk=trunk)
        save_config(written, temporary / MODEL)
        path = temporary / TENSORS
        write_tensors(path, tensors, packed=packed)
        KIND.write_header(temporary, {"dtype": dtype, "sha256": file_digest(path)})
        size = path.stat().st_size
    return size


def selected_step(folder: str | os.PathLike[str]) -> int | None:
    """The step of the best checkpoint of a run, with a printed note.

    None if it is the newest or there is none.
    """
    saved = as_path(folder) / CHECKPOINTS
    newest = max(whole_steps(saved), default=None)
    if newest is None:
        return None
    # Imported here, so that exported parameters load without Orbax.
    from bpd_jax.training.checkpoints import best_step

    best = best_step(saved)
    if best is None or best == newest:
        return None
    print(
        f"{folder}: using the best checkpoint, that of step {best:,}; the newest is "
        f"{saved / str(newest)}",
        file=sys.stderr,
    )
    return best


def load_run_parameters(
    folder: str | os.PathLike[str],
    model: BlockwiseConfig,
    step: int | None = None,
    mesh: Mesh | None = None,
) -> Params:
    """Loads the parameters of a run folder, or exported ones.

    If exported parameters have been trained further, their checkpoints are used: the
    newest without a step. Without a mesh they are on the first device.
    """
    folder = as_path(folder)
    saved = folder / CHECKPOINTS
    # The folder of checkpoints exists before the first one is written.
    trained = step is not None or whole_steps(saved)
    if trained or not (folder / HEADER).exists():
        from bpd_jax.training.checkpoints import load_parameters

        return load_parameters(saved, model, step, mesh)
    return _load_exported(folder, model, mesh)


def _load_exported(
    folder: pathlib.Path, model: BlockwiseConfig, mesh: Mesh | None
) -> Params:
    header = KIND.read_header(folder, {"sha256": str})
    path, shapes = folder / TENSORS, abstract_parameters(model, mesh)
    with KIND.reading(path):
        if header["sha256"] != file_digest(path):
            raise ValueError(f"it does not match {HEADER}")
        stored, _ = read_tensors(path)
        if any(name.endswith(SCALE) for name in stored):
            stored = raised(stored)
        leaves = by_path(shapes)
        check_shapes(stored, {k: x.shape for k, x in leaves.items()})
    parameters = [
        placed(stored[name].astype(leaf.dtype), leaf.sharding)
        for name, leaf in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), parameters)
