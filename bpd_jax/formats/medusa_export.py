"""Exports block heads, in the layouts of other engines for Medusa heads.

In both layouts of Medusa heads (Cai et al. 2024), heads count from 0, and head i
predicts the token i + 2 steps ahead. In bpd_jax heads count from 1, and head 1 is the
model itself, so their head i is head i + 2 here. Its state is x after layers x ← x +
SiLU(W x + b), where W is stored as [out, in], here as [in, out]; its logits are the
product with the rows of a softmax matrix.

FasterDecoding, who first published such heads, use two versions. In the first every
head has its own softmax; in the second all heads use the model's softmax, which is not
stored. Their later checkpoints contain base and heads together, with names that begin
with `medusa_head.`. vLLM can share one softmax as well, but reads it from the file
(`original_lm_head` in config.json), and supports draft vocabularies (`token_map`).
"""

import dataclasses
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.formats.json_files import CONFIG
from bpd_jax.formats.safetensors_files import as_stored, write_folder
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.storage import folders

TOKEN_MAP = "token_map"


class Layout(NamedTuple):
    """Names of one layout, where heads and layers count from 0.

    Attributes:
      name: name of the layout.
      file: name of the file of tensors.
      layer: names of a layer's tensors: head, layer, and `weight` or `bias`.
      softmax: names of a head's softmax: head, and number of layers.
    """

    name: str
    file: str
    layer: str
    softmax: str


VLLM = Layout(
    "vllm", "model.safetensors", "blocks.{0}.layers.{1}.{2}", "lm_heads.{0}.weight"
)
MEDUSA = Layout(
    "medusa", "medusa_lm_head.safetensors", "{0}.{1}.linear.{2}", "{0}.{1}.weight"
)
LAYOUTS = {layout.name: layout for layout in (VLLM, MEDUSA)}


def check_exportable(heads: BlockHeadsConfig | None, layout: Layout) -> None:
    """Checks that other engines can run the heads."""
    if heads is None or heads.num_heads < 2:
        raise UserError(
            "the model has no block heads to export: give a folder with --heads."
        )
    same = BlockHeadsConfig(
        heads.num_heads,
        kind="medusa",
        layers=heads.layers,
        own_softmax=heads.own_softmax,
        draft_vocabulary=heads.draft_vocabulary,
    )
    wrong = [
        f"{field.name} = {getattr(heads, field.name)!r}"
        for field in dataclasses.fields(heads)
        if getattr(heads, field.name) != getattr(same, field.name)
    ]
    if wrong:
        raise UserError(
            "these heads cannot be exported: other engines support only Medusa heads, "
            "x + SiLU(W x + b) with a square W and no layer for head 1, but these have "
            f"{', '.join(wrong)}; train heads of kind medusa."
        )
    if heads.own_softmax and heads.draft_vocabulary is not None:
        raise UserError(
            "heads with both a draft vocabulary and a softmax of their own cannot be "
            f"exported to the layout {layout.name}: train them with only one of the "
            "two."
        )


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
    """
    names = LAYOUTS[layout]
    heads = model.heads
    check_exportable(heads, names)
    assert heads is not None
    settings: dict[str, Any] = {"base_model_name_or_path": base, "torch_dtype": dtype}
    if names is VLLM:
        settings |= {
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
    else:
        settings |= {
            "medusa_num_heads": heads.num_heads - 1,
            "medusa_num_layers": heads.layers,
        }
        # Files of version 1 have no version field.
        settings |= {} if heads.own_softmax else {"version": "2"}
    tensors = _tensors(names, model, heads, params, dtype)
    write_folder(folder, KIND, names.file, tensors, settings)


def _tensors(
    layout: Layout,
    model: BlockwiseConfig,
    heads: BlockHeadsConfig,
    params: Params,
    dtype: str,
) -> dict[str, np.ndarray]:
    """All tensors of the file, by name."""
    arrays = jax.device_get(params["heads"])
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, value: np.ndarray) -> None:
        tensors[name] = as_stored(name, value, dtype)

    for head in range(heads.num_heads - 1):
        for layer in range(heads.layers):
            weight, bias = arrays["kernel"][head, layer].T, arrays["bias"][head, layer]
            add(layout.layer.format(head, layer, "weight"), weight)
            add(layout.layer.format(head, layer, "bias"), bias)
        if heads.own_softmax:
            add(layout.softmax.format(head, heads.layers), arrays["softmax"][head])
    if layout is VLLM and not heads.own_softmax:
        vocabulary = arrays.get("vocabulary")
        rows = jax.device_get(softmax_rows(model, params, vocabulary))
        add(layout.softmax.format(0, heads.layers), rows)
        if vocabulary is not None:
            tensors[TOKEN_MAP] = np.asarray(vocabulary, np.int64)
    return tensors
