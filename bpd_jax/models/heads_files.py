"""Trained block heads on disk: a folder with `heads.json` and `heads.safetensors`.

Heads belong to one model, the base. They are stored apart from it and name it by its
`fingerprint`. What the base has already, the rows of its softmax, is not stored.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bpd_jax import files, folders
from bpd_jax.errors import UserError
from bpd_jax.models.config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.heads import head_shapes, is_trained, softmax_rows
from bpd_jax.typing import Params

FORMAT = 1
HEADER, TENSORS = "heads.json", "heads.safetensors"
KIND = folders.FolderKind("block heads", HEADER, (TENSORS,), '"base_name"')
DTYPES = ("bfloat16", "float32", "int8")

_REMEDY = "train them again, or get the folder again"
SCALE = ".scale"
_SAMPLE = 32


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedHeads:
    """Trained heads.

    Attributes:
      config: their sizes.
      params: what `attach_heads` puts under `params["heads"]`, float32 on the host,
        without the rows of the base's softmax.
      base: fingerprint of the model that they belong to.
      base_name: its name, for messages.
      d_model: D of it.
      vocab_size: V of it.
      facts: how they were trained and what they reach: what JSON can hold.
      folder: where they were read from, for messages.
      identity: tells them from heads trained otherwise: 16 hexadecimal digits.
    """

    config: BlockHeadsConfig
    params: dict[str, np.ndarray]
    base: str
    base_name: str
    d_model: int
    vocab_size: int
    facts: dict[str, Any]
    folder: pathlib.Path
    identity: str


def fingerprint(model: BlockwiseConfig, params: Params) -> str:
    """Tells one trained trunk from another: 16 hexadecimal digits.

    It depends on the trunk's configuration, as far as it is not the default (so that
    fields to come change nothing), precisions and length of texts aside, and on the
    first and the last 32 values of the first and the last row of every tensor, rounded
    to bfloat16. So it is cheap for any size, and the same whether the parameters are
    kept in float32 or in bfloat16. A model that was quantised is another one.
    """
    about = _told(model.trunk)
    for name in ("dtype", "param_dtype", "max_length"):
        about.pop(name, None)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    leaves = jax.tree_util.tree_leaves_with_path(params["trunk"])
    samples = jax.device_get(
        [
            leaf[(end,) * (leaf.ndim - 1)][part]
            for _, leaf in leaves
            for end, part in ((0, slice(_SAMPLE)), (-1, slice(-_SAMPLE, None)))
        ]
    )
    for path, leaf in leaves:
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape}".encode())
    for sample in samples:
        digest.update(np.asarray(sample).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()[:16]


def _told(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not what they are by default."""
    fields = (
        (f.name, getattr(config, f.name), f.default) for f in dataclasses.fields(config)
    )
    return {
        name: _told(value) if dataclasses.is_dataclass(value) else value
        for name, value, default in fields
        if value != default
    }


def save_heads(
    folder: str | os.PathLike[str],
    config: BlockHeadsConfig,
    params: Params,
    *,
    base: str,
    base_name: str,
    d_model: int,
    vocab_size: int,
    facts: Mapping[str, Any],
    dtype: str = "bfloat16",
) -> None:
    """Writes the heads; the folder appears as a whole or not at all.

    Args:
      folder: to write; an older one is replaced.
      config: sizes.
      params: what stands under `params["heads"]`.
      base: fingerprint of the model that they belong to.
      base_name: its name, for messages.
      d_model: D of it.
      vocab_size: V of it.
      facts: see `LoadedHeads`.
      dtype: to store them in: bfloat16, float32, or int8, where every output channel
        of a matrix has a scale of its own and biases are bfloat16.

    Raises:
      UserError: they cannot be stored so, or would change the model itself.
    """
    _check_first(config)
    if dtype not in DTYPES:
        raise UserError(
            f"heads are stored in one of {', '.join(DTYPES)}, not in {dtype!r}."
        )
    about = {
        "format": FORMAT,
        "base": base,
        "base_name": base_name,
        "d_model": d_model,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "config": dataclasses.asdict(config),
        "facts": dict(facts),
    }
    tensors: dict[str, np.ndarray] = {}
    for name, value in jax.device_get(params).items():
        if name == "vocabulary":
            tensors[name] = np.asarray(value, np.int32)
        elif is_trained(config, name):
            tensors |= packed(name, np.asarray(value, np.float32), dtype)
    with folders.replacing_folder(folder, KIND) as temporary:
        save_file(tensors, temporary / TENSORS)
        text = json.dumps(about, indent=2) + "\n"
        (temporary / HEADER).write_text(text, encoding="utf-8")


def load_heads(folder: str | os.PathLike[str]) -> LoadedHeads:
    """Reads what `save_heads` wrote.

    Raises:
      UserError: the folder is missing, damaged, or holds no heads.
    """
    folder = pathlib.Path(folder)
    about = _read_header(folder / HEADER)
    path = folder / TENSORS
    try:
        stored = load_file(path)
        with path.open("rb") as file:
            identity = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path} ({error}): {_REMEDY}.") from error
    config = about["config"]
    shapes = {
        name: shape
        for name, shape in head_shapes(
            config, about["d_model"], about["vocab_size"]
        ).items()
        if name == "vocabulary" or is_trained(config, name)
    }
    params = {
        name: tensor if name == "vocabulary" else unpacked(name, stored)
        for name, tensor in stored.items()
        if not name.endswith(SCALE)
    }
    for name in sorted(shapes.keys() | params.keys()):
        found = params[name].shape if name in params else "missing"
        if found != shapes.get(name):
            raise UserError(
                f"{path} does not fit {HEADER}: {name} is {found} and not "
                f"{shapes.get(name, 'known')}: {_REMEDY}."
            )
    if "vocabulary" in params:
        check_vocabulary(path, params["vocabulary"], about["vocab_size"])
    return LoadedHeads(**about, params=params, folder=folder, identity=identity)


def attach_heads(
    model: BlockwiseConfig,
    params: Params,
    heads: LoadedHeads,
    *,
    name: str = "this model",
    check: bool = True,
) -> tuple[BlockwiseConfig, Params]:
    """Gives a model trained heads, in place of any that it has.

    Args:
      model: the base.
      params: of it; the arrays are shared with the result.
      heads: to attach, in the base's `param_dtype`.
      name: of the base, for messages.
      check: whether heads of another model of the same sizes are refused. With heads
        that are not its own drafts get worse, but texts stay the same.

    Raises:
      UserError: the heads belong to another model, or would change the model itself.
    """
    _check_first(heads.config)
    trunk = model.trunk
    remedy = (
        f"train heads for {name}, give other ones with --heads, or move {heads.folder} "
        "away."
    )
    if (heads.d_model, heads.vocab_size) != (trunk.d_model, trunk.vocab_size):
        raise UserError(
            f"the block heads in {heads.folder} belong to {heads.base_name}, of width "
            f"{heads.d_model} and {heads.vocab_size} tokens, and {name} has width "
            f"{trunk.d_model} and {trunk.vocab_size} tokens: {remedy}"
        )
    found = fingerprint(model, params)
    if check and found != heads.base:
        raise UserError(
            f"the block heads in {heads.folder} were trained on {heads.base_name} "
            f"({heads.base}), and {name} ({found}) is another model: {remedy}"
        )
    attached = {
        key: jnp.asarray(value, None if key == "vocabulary" else trunk.param_dtype)
        for key, value in heads.params.items()
    }
    if heads.config.has_softmax and not heads.config.own_softmax:
        attached["softmax"] = softmax_rows(model, params, attached["vocabulary"])
    config = dataclasses.replace(model, heads=heads.config)
    return config, {"trunk": params["trunk"], "heads": attached}


def _check_first(config: BlockHeadsConfig) -> None:
    if config.first_has_ffn:
        raise UserError(
            "heads with first_has_ffn would change head 1, which is the model itself, "
            "and with it every text: train heads without it."
        )


def packed(
    name: str,
    value: np.ndarray,
    dtype: str,
    inputs: tuple[int, ...] | None = None,
) -> dict[str, np.ndarray]:
    """The tensors that hold one parameter in a precision of `DTYPES`.

    Args:
      name: of the parameter.
      value: float32.
      dtype: to store it in.
      inputs: axes that a product sums over; None for those of a parameter of heads.
    """
    if dtype == "float32":
        return {name: value}
    if dtype == "bfloat16" or name.startswith("bias") or value.ndim < 2:
        return {name: value.astype(ml_dtypes.bfloat16)}
    axes = (_inputs(name),) if inputs is None else inputs
    scale = np.abs(value).max(axes, keepdims=True) / 127
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    return {name: np.rint(value / scale).astype(np.int8), name + SCALE: scale}


def unpacked(
    name: str,
    stored: Mapping[str, np.ndarray],
    inputs: tuple[int, ...] | None = None,
) -> np.ndarray:
    """The inverse of `packed`, float32, up to rounding."""
    value = stored[name].astype(np.float32)
    if name + SCALE not in stored:
        return value
    scale = stored[name + SCALE]
    if value.ndim < 2:
        raise UserError(f"{name} is no matrix and has scales: {_REMEDY}.")
    wanted = list(value.shape)
    for axis in (_inputs(name),) if inputs is None else inputs:
        wanted[axis] = 1
    if list(scale.shape) != wanted:
        raise UserError(
            f"the scales of {name} are {list(scale.shape)} and not {wanted}: {_REMEDY}."
        )
    return value * scale


def _inputs(name: str) -> int:
    """The axis of a matrix that a product sums over."""
    return -1 if name == "softmax" else -2


def _read_header(path: pathlib.Path) -> dict[str, Any]:
    """The fields of a `LoadedHeads`, `params` aside."""
    try:
        about = files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path.parent} holds no block heads: {path} is missing."
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}): {_REMEDY}.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise UserError(f"{path} is not of format {FORMAT}: {_REMEDY}.")
    try:
        config = BlockHeadsConfig(**about["config"])
        _check_first(config)
        return {
            "config": config,
            "base": str(about["base"]),
            "base_name": str(about["base_name"]),
            "d_model": int(about["d_model"]),
            "vocab_size": int(about["vocab_size"]),
            "facts": dict(about["facts"]),
        }
    except (KeyError, TypeError, ValueError, UserError) as error:
        raise UserError(f"{path} describes no heads ({error}): {_REMEDY}.") from error


def check_vocabulary(path: pathlib.Path, ids: np.ndarray, vocab_size: int) -> None:
    """Raises a `UserError` unless `ids` are different tokens of a vocabulary."""
    inside = 0 <= ids.min() <= ids.max() < vocab_size
    if ids.dtype != np.int32 or not inside or len(np.unique(ids)) != len(ids):
        raise UserError(
            f"{path}: its draft vocabulary is not made of different tokens below "
            f"{vocab_size}: {_REMEDY}."
        )
