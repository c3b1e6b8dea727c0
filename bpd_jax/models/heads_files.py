"""Trained block heads on disk: a folder with `heads.json` and `heads.safetensors`."""

import dataclasses
from typing import TypeAlias

import numpy as np
from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.models.attachments import (
    VOCABULARY,
    Attachment,
    AttachmentFiles,
    fingerprint,
)
from bpd_jax.models.block_heads import head_shapes, is_trained, softmax_rows
from bpd_jax.models.blockwise import abstract_parameters
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.partitioning import placed
from bpd_jax.storage.folders import Artifact

LoadedHeads: TypeAlias = Attachment[BlockHeadsConfig]

HEADER, TENSORS = "heads.json", "heads.safetensors"
KIND = Artifact(
    "block heads",
    HEADER,
    (TENSORS,),
    '"base_name"',
    remedy="train them again, or get the folder again",
)


def attach_heads(
    model: BlockwiseConfig,
    params: Params,
    heads: LoadedHeads,
    *,
    name: str = "this model",
    base: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[BlockwiseConfig, Params]:
    """Attaches trained heads to a model, in its `param_dtype`, replacing its own.

    The result shares the model's arrays. `base` is its fingerprint, which is computed
    if it is None.
    """
    remedy = (
        f"train heads for {name}, give other heads with --heads, or remove "
        f"{heads.folder}."
    )
    base = base or fingerprint(model, params)
    heads.check_base(KIND.title, model, base, name, remedy)
    config = dataclasses.replace(model, heads=heads.config)
    shapes = abstract_parameters(config, mesh)["heads"]
    attached = {
        key: placed(np.asarray(value, shapes[key].dtype), shapes[key].sharding)
        for key, value in heads.tensors.items()
    }
    if heads.config.has_softmax and not heads.config.own_softmax:
        attached["softmax"] = softmax_rows(model, params, attached[VOCABULARY])
    return config, {"trunk": params["trunk"], "heads": attached}


def _shapes(
    config: BlockHeadsConfig, d_model: int, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    if config.first_has_ffn:
        raise UserError(
            "heads with first_has_ffn would change head 1, which is the model itself, "
            "and all decoded texts: train heads without it."
        )
    shapes = head_shapes(config, d_model, vocab_size)
    return {
        name: shape
        for name, shape in shapes.items()
        if name == VOCABULARY or is_trained(config, name)
    }


_FILES = AttachmentFiles(
    KIND,
    TENSORS,
    lambda fields: BlockHeadsConfig(**fields),
    _shapes,
    lambda name, axes: (-1 if name == "softmax" else -2,),
)
# Parameters are `params["heads"]` of a model.
save_heads, load_heads = _FILES.save, _FILES.load
