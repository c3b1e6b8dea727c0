"""Trained block heads on disk: a folder with `heads.json` and `heads.safetensors`."""

import dataclasses
import os
from typing import Any, TypeAlias, Unpack

import jax.numpy as jnp

from bpd_jax.artifacts import Artifact
from bpd_jax.errors import UserError
from bpd_jax.models.attachments import VOCABULARY, About, Attachment, AttachmentFiles
from bpd_jax.models.block_heads import head_shapes, is_trained, softmax_rows
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.typing import Params

LoadedHeads: TypeAlias = Attachment[BlockHeadsConfig]

HEADER, TENSORS = "heads.json", "heads.safetensors"
KIND = Artifact(
    "block heads",
    HEADER,
    (TENSORS,),
    '"base_name"',
    remedy="train them again, or get the folder again",
)


def save_heads(
    folder: str | os.PathLike[str],
    config: BlockHeadsConfig,
    params: Params,
    *,
    dtype: str = "bfloat16",
    **about: Unpack[About],
) -> None:
    """Writes heads, `params["heads"]` of a model; see `AttachmentFiles.save`.

    Raises:
      UserError: the heads would change head 1, or cannot be written.
    """
    _check_first(config)
    stored = {
        name: value
        for name, value in params.items()
        if name == VOCABULARY or is_trained(config, name)
    }
    _FILES.save(folder, config, stored, dtype, **about)


def load_heads(folder: str | os.PathLike[str]) -> LoadedHeads:
    """Reads what `save_heads` wrote.

    Raises:
      UserError: the folder is missing, damaged, or contains no heads.
    """
    return _FILES.load(folder)


def attach_heads(
    model: BlockwiseConfig,
    params: Params,
    heads: LoadedHeads,
    *,
    name: str = "this model",
    check: bool = True,
) -> tuple[BlockwiseConfig, Params]:
    """Attaches trained heads to a model, replacing its own.

    Args:
      model: configuration of the model.
      params: parameters of the model; the result shares their arrays.
      heads: the heads, which are converted to the model's `param_dtype`.
      name: name of the model for messages.
      check: whether heads of another model of the same sizes are rejected. They draft
        worse, but do not change the decoded texts.

    Raises:
      UserError: the heads belong to another model, or would change head 1.
    """
    _check_first(heads.config)
    remedy = (
        f"train heads for {name}, give other heads with --heads, or remove "
        f"{heads.folder}."
    )
    heads.check_base(KIND.title, model, params, name, remedy, check=check)
    attached = {
        key: jnp.asarray(value, None if key == VOCABULARY else model.trunk.param_dtype)
        for key, value in heads.tensors.items()
    }
    if heads.config.has_softmax and not heads.config.own_softmax:
        attached["softmax"] = softmax_rows(model, params, attached[VOCABULARY])
    config = dataclasses.replace(model, heads=heads.config)
    return config, {"trunk": params["trunk"], "heads": attached}


def _check_first(config: BlockHeadsConfig) -> None:
    if config.first_has_ffn:
        raise UserError(
            "heads with first_has_ffn would change head 1, which is the model itself, "
            "and all decoded texts: train heads without it."
        )


def _read_config(fields: dict[str, Any]) -> BlockHeadsConfig:
    config = BlockHeadsConfig(**fields)
    _check_first(config)
    return config


def _shapes(
    config: BlockHeadsConfig, d_model: int, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    shapes = head_shapes(config, d_model, vocab_size)
    return {
        name: shape
        for name, shape in shapes.items()
        if name == VOCABULARY or is_trained(config, name)
    }


def _inputs(name: str, axes: int) -> tuple[int, ...]:
    del axes
    return (-1 if name == "softmax" else -2,)


_FILES = AttachmentFiles(KIND, TENSORS, _read_config, _shapes, _inputs)
