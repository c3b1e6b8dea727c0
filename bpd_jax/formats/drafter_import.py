"""Imports published block drafters and EAGLE-3 drafters.

A drafter that bpd_jax cannot compute exactly is refused. `drafter_layout` describes the
layouts of block drafters; the tensors of EAGLE-3 are listed in `models.eagle`.

Two layouts of EAGLE-3 are in use. That of the library `speculators` describes the layer
in `transformer_layer_config`; that of the authors, which SGLang and SpecForge share, is
the config.json of a Llama model with more fields, some of them in `eagle_config`.

The layers that it reads are counted differently: `eagle_aux_hidden_state_layer_ids` at
the top level counts the embedding as 0, so id i is layer i - 1 here, as do `layer_ids`
of `eagle_config`; its own `eagle_aux_hidden_state_layer_ids` count layers from 0, as
here. Without any they are layers 1, N/2 - 1 and N - 4 of N, as the reference libraries
choose them.
"""

import dataclasses
import hashlib
import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from bpd_jax.base.errors import UserError, naming
from bpd_jax.base.typing import Params
from bpd_jax.decoding.pretrained_checkpoint import Origin
from bpd_jax.formats.drafter_description import describe, layer_sizes, unsupported
from bpd_jax.formats.drafter_layout import (
    TYPE,
    check_sizes,
    draft_vocabulary,
    drafter_layout,
    own_softmax,
    read_layout,
    target_embedding,
    unless_equal,
)
from bpd_jax.formats.json_files import CONFIG, Fields
from bpd_jax.formats.safetensors_files import open_checkpoint
from bpd_jax.formats.trunk_layouts import llama_layer
from bpd_jax.models.attachment_files import LoadedDrafter
from bpd_jax.models.attachments import check_finite, fingerprint, nested
from bpd_jax.models.block_drafter import with_softmax
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.eagle import EagleConfig, EagleFunctions
from bpd_jax.models.partitioning import on_host
from bpd_jax.models.stored_tensors import file_digest
from bpd_jax.models.transformer_config import TransformerConfig, check_feature_layers
from bpd_jax.storage.paths import as_path

# Names that versions of the layout have in `architectures`.
_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def import_drafter(
    folder: str | os.PathLike[str],
    model: BlockwiseConfig,
    params: Params,
    *,
    name: str = "this model",
    base: str | None = None,
) -> LoadedDrafter:
    """Reads a published block drafter of a model, with tensors as they are stored.

    The files do not record the model exactly; its width, its vocabulary and, where the
    drafter has embeddings of its own, these are compared. The drafter has a softmax of
    its own if that differs from the target's.

    Args:
      folder: folder with config.json and safetensors files.
      model: the target model.
      params: parameters of the target.
      name: name of the target for messages.
      base: fingerprint of the target; None to compute it from `params`, which then have
        the layout in which they were stored.
    """
    folder = as_path(folder)
    fields = Fields.read(folder / CONFIG)
    tensors = open_checkpoint(folder)
    about = describe(fields, tensors.names)
    trunk = model.trunk
    check_sizes(folder, (about.d_model, about.vocab_size), trunk, name)
    if about.normalised_last and (trunk.num_layers - 1 in about.config.feature_layers):
        raise UserError(
            f"{fields.source} reads the last of the {trunk.num_layers} layers of "
            f"{name} after its final norm, which cannot be reproduced here: layers are "
            "read before it."
        )
    with naming(fields.source):
        config = about.config.resolve(trunk)
    layout = drafter_layout(config, trunk)
    arrays = read_layout(folder, tensors, layout)
    vocabulary = draft_vocabulary(
        folder, tensors, config.draft_vocabulary, trunk.vocab_size
    )
    if vocabulary is not None:
        arrays["vocabulary"] = vocabulary
    embedding = params["trunk"]["embedding"]
    own = target_embedding(folder, tensors, embedding, besides=about.mask_token)
    table = embedding if own is None else own
    arrays["mask_embedding"] = np.asarray(on_host(table[about.mask_token]), np.float32)
    softmax = own_softmax(folder, tensors, softmax_rows(model, params, vocabulary))
    if softmax is not None:
        arrays["softmax"] = softmax
    check_finite(arrays, folder)  # Also the embedding and the softmax.
    digest = hashlib.sha256()
    for path in [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]:
        digest.update(bytes.fromhex(file_digest(path)))
    return LoadedDrafter(
        config=config,
        tensors=arrays,
        base=base or fingerprint(model, params),
        base_name=name,
        d_model=trunk.d_model,
        vocab_size=trunk.vocab_size,
        facts={"imported_from": folder.resolve().name},
        folder=folder,
        identity=digest.hexdigest()[:16],
    )


def import_eagle(
    folder: str | os.PathLike[str],
    model: BlockwiseConfig,
    params: Params,
    name: str = "this model",
) -> tuple[EagleFunctions, Params]:
    """Reads a published EAGLE-3 drafter of the model that `name` names in messages.

    It shares the embedding of the model unless it has another one.
    """
    folder = as_path(folder)
    fields = Fields.read(folder / CONFIG)
    tensors = open_checkpoint(folder)
    trunk = model.trunk
    with naming(fields.source):
        config = _describe(fields, trunk, name)
        check_feature_layers(config.feature_layers, trunk.num_layers)
    first = "midlayer."
    if not any(tensor.startswith(first) for tensor in tensors.names):
        first = "layers.0."
    layout = _layout(config, first)
    arrays = read_layout(folder, tensors, layout)
    trained = nested(arrays, trunk.param_dtype)
    vocabulary = draft_vocabulary(
        folder, tensors, config.draft_vocabulary, trunk.vocab_size
    )
    embedding = params["trunk"]["embedding"]
    own = target_embedding(folder, tensors, embedding)
    if own is not None and unless_equal(own, embedding) is not None:
        embedding = jnp.asarray(own, trunk.param_dtype)
    trained = with_softmax(trained, softmax_rows(model, params, None), vocabulary)
    softmax = own_softmax(folder, tensors, softmax_rows(model, params, vocabulary))
    if softmax is not None:
        check_finite({"lm_head": softmax}, folder)
        trained["softmax"] = jnp.asarray(softmax, trunk.param_dtype)
    return EagleFunctions(config), {**trained, "embedding": embedding}


def _describe(fields: Fields, target: TransformerConfig, name: str) -> EagleConfig:
    """Reads a config.json in any of the layouts."""
    layers, inner = fields, fields.fields("eagle_config")
    if TYPE in fields:
        kind = fields.text(TYPE)
        layers = fields.fields("transformer_layer_config")
    else:
        names = [str(name) for name in fields.items("architectures")]
        # The first drafters have the name of a Llama.
        first = names == ["LlamaForCausalLM"] and "draft_vocab_size" in fields
        known = first or any(name in _NAMES for name in names)
        kind = "eagle3" if known else ", ".join(names) or "unknown"
    if kind != "eagle3":
        raise UserError(
            f"{fields.source} describes a drafter of type {kind!r}, not eagle3: pass "
            "block drafters as --drafter."
        )
    both = Fields({**fields.values, **inner.values}, fields.source)
    sizes = layers.integer("hidden_size"), layers.integer("vocab_size")
    check_sizes(fields.source, sizes, target, name)
    if both.integer("target_hidden_size", sizes[0]) != sizes[0]:
        unsupported(fields, "a width that is not that of the model")
    if layers.integer("num_hidden_layers", 1) != 1:
        unsupported(fields, "more than one layer (num_hidden_layers)")
    if "sliding_attention" in layers.items("layer_types"):
        unsupported(fields, "a sliding window")
    for flag in ("parallel_drafting", "bias"):
        if both.flag(flag, False):
            unsupported(fields, flag)
    options: dict[str, Any] = layer_sizes(both, layers)
    # Queries and keys are normalised as in Qwen3 only where the type says so.
    normed = layers.text("model_type", "llama") == "qwen3" or both.flag(
        "qk_norm", False
    )
    options |= {"query_key_norm": normed, "num_layers": 1}
    numbers = _feature_layers(fields, inner, target.num_layers)
    draft = both.integer("draft_vocab_size", sizes[1])
    joint, each = both.flag("norm_before_fc", False), both.flag("fc_norm", False)
    return EagleConfig(
        layer=TransformerConfig(
            vocab_size=sizes[1],
            d_model=sizes[0],
            max_length=target.max_length,
            gated=True,
            use_bias=False,
            output_bias=options["qkv_bias"],
            norm="rms",
            dtype=target.dtype,
            param_dtype=target.param_dtype,
            **options,
        ),
        feature_layers=numbers,
        feature_norms=len(numbers) if each else int(joint),
        norm_before_residual=both.flag("norm_before_residual", False),
        feeds_normalised=both.flag("norm_output", False),
        draft_vocabulary=None if draft == sizes[1] else draft,
    )


def _feature_layers(fields: Fields, inner: Fields, layers: int) -> tuple[int, ...]:
    """Layers of the target that the drafter reads, counted from 0."""
    numbers, first = inner.items(_LAYER_IDS), 0
    if not numbers:
        numbers = fields.items(_LAYER_IDS) or inner.items("layer_ids")
        numbers, first = numbers or [2, layers // 2, layers - 3], 1
    if not all(type(number) is int for number in numbers) or min(numbers) < first:
        unsupported(fields, f"the embedding or no layer of the model ({numbers})")
    return tuple(number - first for number in numbers)


def _layout(config: EagleConfig, first: str) -> dict[str, Origin]:
    """The tensors by the paths of the parameters; `first` is the layer's prefix."""
    layer = config.layer
    width = layer.d_model
    inputs = len(config.feature_layers) * width
    layout = {
        "fusion/kernel": Origin("fc.weight", (width, inputs), np.transpose),
        "hidden_norm/scale": Origin(f"{first}hidden_norm.weight", (width,)),
        "final_norm/scale": Origin("norm.weight", (width,)),
    }
    parts = config.feature_norms
    for part in range(parts):
        stored = "input_norm.weight" if parts == 1 else f"fc_norm.{part}.weight"
        layout[f"feature_norm_{part}/scale"] = Origin(stored, (inputs // parts,))
    # Queries, keys and values are projections of two states side by side.
    wide = llama_layer(dataclasses.replace(layer, d_model=2 * width), 0)
    for path, origin in llama_layer(layer, 0).items():
        if path[1] in ("query", "key", "value"):
            origin = wide[path]
        stored = origin.name.replace("model.layers.0.", first)
        layout["/".join(path)] = Origin(stored, origin.shape, origin.convert)
    return layout
