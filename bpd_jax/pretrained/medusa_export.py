"""Block heads, written for other engines in the layouts of `medusa_layout`."""

import json
import os
import shlex
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from bpd_jax import folders
from bpd_jax.errors import UserError
from bpd_jax.models.config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.heads import softmax_rows
from bpd_jax.pretrained.medusa_layout import (
    CONFIG,
    LAYOUTS,
    TOKEN_MAP,
    VLLM,
    Layout,
    check_exportable,
)
from bpd_jax.typing import Params

_DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
DTYPES = tuple(_DTYPES)
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
    """Writes the heads of a model; the folder appears as a whole or not at all.

    A draft vocabulary has no place in the layout `medusa`: such heads choose from all
    tokens there.

    Args:
      folder: to write; an older one is replaced.
      model: the base with its heads.
      params: of both.
      layout: `vllm` or `medusa`.
      base: name or path of the base, as the other engine finds it.
      dtype: to store the numbers in: bfloat16, float16 or float32.

    Raises:
      UserError: other engines cannot run such heads, or a number exceeds float16.
    """
    place = LAYOUTS[layout]
    check_exportable(model.heads, place)
    assert model.heads is not None
    tensors = _tensors(place, model, params, dtype)
    settings = {
        "base_model_name_or_path": base,
        "torch_dtype": dtype,
        **(
            _vllm_settings(model, model.heads)
            if place is VLLM
            else _medusa_settings(model.heads)
        ),
    }
    with folders.replacing_folder(folder, KIND) as temporary:
        # Readers of transformers' files ask for this note.
        save_file(tensors, temporary / place.file, metadata={"format": "pt"})
        text = json.dumps(settings, indent=2) + "\n"
        (temporary / CONFIG).write_text(text, encoding="utf-8")


def vllm_command(base: str, folder: str, heads: int) -> str:
    """What starts vLLM with `heads` exported heads in `folder` on a base.

    >>> print(vllm_command("base", "exported", 8))
    vllm serve base --speculative-config '{"method": "medusa", "model": "exported", \
"num_speculative_tokens": 8}'
    """
    settings = {"method": "medusa", "model": folder, "num_speculative_tokens": heads}
    return shlex.join(
        ["vllm", "serve", base, "--speculative-config", json.dumps(settings)]
    )


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
    # The first version did not call itself that.
    return sizes if heads.own_softmax else {**sizes, "version": "2"}


def _tensors(
    layout: Layout, model: BlockwiseConfig, params: Params, dtype: str
) -> dict[str, np.ndarray]:
    """All tensors of the file, by name."""
    heads = model.heads
    assert heads is not None
    found = jax.device_get(params["heads"])
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, value: np.ndarray) -> None:
        # Numbers too large for float16 are reported below, once.
        with np.errstate(over="ignore"):
            tensors[name] = np.ascontiguousarray(value, _DTYPES[dtype])
        if dtype == "float16" and not np.isfinite(tensors[name]).all():
            raise UserError(f"{name} has numbers beyond float16: choose bfloat16.")

    for head in range(heads.num_heads - 1):
        for layer in range(heads.layers):
            weight, bias = found["kernel"][head, layer].T, found["bias"][head, layer]
            add(layout.layer_name(head, layer, "weight"), weight)
            add(layout.layer_name(head, layer, "bias"), bias)
        if heads.own_softmax:
            add(layout.softmax_name(head, heads.layers), found["softmax"][head])
    if layout is VLLM and not heads.own_softmax:
        vocabulary = found.get("vocabulary")
        rows = jax.device_get(softmax_rows(model, params, vocabulary))
        add(layout.softmax_name(0, heads.layers), rows)
        if vocabulary is not None:
            tensors[TOKEN_MAP] = np.asarray(vocabulary, np.int64)
    return tensors
