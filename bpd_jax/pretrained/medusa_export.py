"""Exports block heads for other engines, in the layouts of `medusa_layout`."""

import os
from typing import Any

import jax
import numpy as np

from bpd_jax.base.typing import Params
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.pretrained.export_folder import as_stored, write_folder
from bpd_jax.pretrained.medusa_layout import (
    LAYOUTS,
    TOKEN_MAP,
    VLLM,
    Layout,
    check_exportable,
)
from bpd_jax.pretrained.safetensors_files import CONFIG
from bpd_jax.storage import folders

KIND = folders.FolderKind(
    "exported Medusa heads",
    CONFIG,
    tuple(layout.file for layout in LAYOUTS.values()),
    '"medusa',
)


def export_heads(
    folder: str | os.PathLike[str],
    model: BlockwiseConfig,
    params: Params,
    *,
    layout: str,
    base: str,
    dtype: str = "bfloat16",
) -> None:
    """Writes the heads of a model atomically.

    The layout `medusa` has no draft vocabulary: its heads choose from all tokens.

    Args:
      folder: output folder; an older export is replaced.
      model: the base model with its heads.
      params: parameters of both.
      layout: `vllm` or `medusa`.
      base: name or path of the base model for the other engine.
      dtype: dtype of the stored tensors: bfloat16, float16 or float32.

    Raises:
      UserError: other engines cannot run such heads, or a number exceeds float16.
    """
    names = LAYOUTS[layout]
    check_exportable(model.heads, names)
    assert model.heads is not None
    tensors = _tensors(names, model, params, dtype)
    settings = {
        "base_model_name_or_path": base,
        "torch_dtype": dtype,
        **(
            _vllm_settings(model, model.heads)
            if names is VLLM
            else _medusa_settings(model.heads)
        ),
    }
    write_folder(folder, KIND, names.file, tensors, settings)


def _vllm_settings(model: BlockwiseConfig, heads: BlockHeadsConfig) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": model.trunk.d_model,
        "vocab_size": model.trunk.vocab_size,
        "truncated_vocab_size": model.draft_vocab_size,
        "num_heads": heads.num_heads - 1,
        "num_hidden_layers": heads.layers,
        "medusa_fc_bias": True,
        "original_lm_head": not heads.own_softmax,
    }


def _medusa_settings(heads: BlockHeadsConfig) -> dict[str, Any]:
    sizes = {
        "medusa_num_heads": heads.num_heads - 1,
        "medusa_num_layers": heads.layers,
    }
    # Files of version 1 have no version field.
    return sizes if heads.own_softmax else {**sizes, "version": "2"}


def _tensors(
    layout: Layout, model: BlockwiseConfig, params: Params, dtype: str
) -> dict[str, np.ndarray]:
    """All tensors of the file, by name."""
    heads = model.heads
    assert heads is not None
    arrays = jax.device_get(params["heads"])
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, value: np.ndarray) -> None:
        tensors[name] = as_stored(name, value, dtype)

    for head in range(heads.num_heads - 1):
        for layer in range(heads.layers):
            weight, bias = arrays["kernel"][head, layer].T, arrays["bias"][head, layer]
            add(layout.layer_name(head, layer, "weight"), weight)
            add(layout.layer_name(head, layer, "bias"), bias)
        if heads.own_softmax:
            add(layout.softmax_name(head, heads.layers), arrays["softmax"][head])
    if layout is VLLM and not heads.own_softmax:
        vocabulary = arrays.get("vocabulary")
        rows = jax.device_get(softmax_rows(model, params, vocabulary))
        add(layout.softmax_name(0, heads.layers), rows)
        if vocabulary is not None:
            tensors[TOKEN_MAP] = np.asarray(vocabulary, np.int64)
    return tensors
