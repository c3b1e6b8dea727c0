"""Exports block drafters in the layout of speculators; see `drafter_layout`.

The folder contains everything that drafting needs, including an embedding (the
target's, with the mask embedding in the row of the mask token) and the softmax.
"""

import json
import os
import shlex
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.formats.drafter_layout import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    SOFTMAX,
    TARGET_IN_DRAFT,
    TYPE,
    drafter_layout,
)
from bpd_jax.formats.json_files import CONFIG
from bpd_jax.formats.safetensors_files import SINGLE
from bpd_jax.models.attachment_files import SOFTMAX as OWN_SOFTMAX
from bpd_jax.models.attachment_files import LoadedDrafter
from bpd_jax.models.attachments import VOCABULARY
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.storage import files, folders

# The version of speculators that introduced this layout.
VERSION = "0.9.0"
# A published drafter has the other files, too; only the header tells which we made.
KIND = folders.Artifact("an exported block drafter", "exported.json", (CONFIG, SINGLE))

_DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
TENSOR_DTYPES = tuple(_DTYPES)


def export_drafter(
    folder: str | os.PathLike[str],
    model: BlockwiseConfig,
    params: Params,
    drafter: LoadedDrafter,
    *,
    base: str,
    mask_token: int,
    dtype: str = "bfloat16",
) -> None:
    """Writes a block drafter atomically.

    Args:
      folder: output folder; an older export is replaced.
      model: the target model.
      params: its parameters.
      drafter: the block drafter.
      base: name or path of the target for the other program.
      mask_token: token whose embedding is replaced by the mask embedding; a token that
        is never followed by another one.
      dtype: dtype of the stored tensors, one of `TENSOR_DTYPES`.
    """
    config = drafter.config.resolve(model.trunk)
    check_exportable(config)
    settings = _settings(config, model, base, mask_token, dtype)
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, value: Any) -> None:
        tensors[name] = _as_stored(name, value, dtype)

    # Speculators has the tokens of a draft vocabulary in ascending order.
    vocabulary = drafter.tensors.get(VOCABULARY)
    order = None if vocabulary is None else np.argsort(vocabulary)
    if vocabulary is not None:
        vocabulary = np.asarray(vocabulary, np.int64)[order]
        tensors[DRAFT_TO_TARGET] = vocabulary - np.arange(len(vocabulary))
        members = np.zeros(model.trunk.vocab_size, bool)
        members[vocabulary] = True
        tensors[TARGET_IN_DRAFT] = members
    for path, origin in drafter_layout(config, model.trunk).items():
        value = drafter.tensors[path]
        value = value[order] if path == "markov/output" else value
        add(origin.name, origin.stored(value))
    embedding = np.array(jax.device_get(params["trunk"]["embedding"]))
    embedding[mask_token] = drafter.tensors["mask_embedding"]
    add(EMBEDDING, embedding)
    softmax = drafter.tensors.get(OWN_SOFTMAX)
    if softmax is None:
        softmax = softmax_rows(model, params, vocabulary)
    elif order is not None:
        softmax = softmax[order]
    add(SOFTMAX, softmax)
    with folders.replacing_folder(folder, KIND) as temporary:
        # Readers of transformers' files expect this entry.
        save_file(tensors, temporary / SINGLE, metadata={"format": "pt"})
        files.write_json(temporary / CONFIG, settings)
        KIND.write_header(temporary, {"base": base})


def check_exportable(config: BlockDrafterConfig) -> None:
    """Checks that the layout and the servers that read it support a block drafter."""
    wrong = None
    if config.reads_last_token:
        wrong = "reads_last_token = True adds a projection to its queries"
    elif not config.query_key_norm:
        wrong = "query_key_norm = False leaves queries and keys as they are"
    elif config.activation != "silu":
        wrong = f"activation = {config.activation!r} is not 'silu'"
    elif config.rotary is not None and config.rotary.fraction != 1:
        wrong = "rotary positions for a part of each head"
    elif config.convolution_taps or config.markov_reads_state or config.moving_window:
        wrong = "convolution_taps, markov_reads_state or moving_window (DFlash2)"
    if wrong is not None:
        raise UserError(
            f"this block drafter cannot be exported: {wrong}, which other programs do "
            "not support; train one without it."
        )


def served_method(config: BlockDrafterConfig) -> str:
    """The type of a block drafter: dflash if sufficient, otherwise dspark."""
    extra = config.markov_rank or config.confidence or config.guess_at_anchor
    return "dspark" if extra else "dflash"


def vllm_command(base: str, method: str, folder: str, num_tokens: int) -> str:
    """Returns the command that starts vLLM with an exported drafter.

    >>> print(vllm_command("base", "dspark", "exported", 8))
    vllm serve base --speculative-config '{"method": "dspark", "model": "exported", \
"num_speculative_tokens": 8}'
    """
    settings = {
        "method": method,
        "model": folder,
        "num_speculative_tokens": num_tokens,
    }
    return shlex.join(
        ["vllm", "serve", base, "--speculative-config", json.dumps(settings)]
    )


def _as_stored(name: str, value: Any, dtype: str) -> np.ndarray:
    """Returns an array in one of `TENSOR_DTYPES`, contiguous and on the host."""
    # A number too large for float16 is reported below.
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(jax.device_get(value), _DTYPES[dtype])
    if dtype == "float16" and not np.isfinite(stored).all():
        raise UserError(f"{name} has numbers beyond float16: choose bfloat16.")
    return stored


def _settings(
    config: BlockDrafterConfig,
    model: BlockwiseConfig,
    base: str,
    mask_token: int,
    dtype: str,
) -> dict[str, Any]:
    """The fields of config.json."""
    method = served_method(config)
    name = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}[method]
    vocab_size = model.trunk.vocab_size
    settings = {
        "architectures": [name],
        TYPE: method,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": base, "architectures": []},
        },
        "transformer_layer_config": _layer_settings(config, model),
        "draft_vocab_size": config.draft_vocabulary or vocab_size,
        "block_size": config.queries,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.feature_layers],
        "mask_token_id": mask_token,
        "sample_from_anchor": config.guess_at_anchor,
        "sliding_window_non_causal": config.window is not None,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    if method == "dspark":
        settings |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_reads_markov,
        }
    return settings


def _layer_settings(
    config: BlockDrafterConfig, model: BlockwiseConfig
) -> dict[str, Any]:
    """The configuration of the layers, in the form of a Qwen3 model."""
    assert config.rotary is not None
    kind = "full_attention" if config.window is None else "sliding_attention"
    return {
        "model_type": "qwen3",
        "vocab_size": model.trunk.vocab_size,
        "hidden_size": model.trunk.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "attention_bias": config.qkv_bias,
        "max_position_embeddings": model.trunk.max_length,
        "rope_theta": config.rotary.base,
        "rope_parameters": _rope_parameters(config.rotary),
        "layer_types": [kind] * config.num_layers,
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "tie_word_embeddings": False,
    }


def _rope_parameters(rotary: RotaryConfig) -> dict[str, Any]:
    """The inverse of `hf_config.rotary_config`."""
    parameters: dict[str, Any] = {"rope_theta": rotary.base}
    if rotary.scaling == "none":
        return {"rope_type": "default", **parameters}
    parameters |= {"rope_type": rotary.scaling, "factor": rotary.factor}
    if rotary.scaling != "linear":
        parameters["original_max_position_embeddings"] = rotary.original_length
    if rotary.scaling == "llama3":
        parameters["low_freq_factor"] = rotary.low_factor
        parameters["high_freq_factor"] = rotary.high_factor
    if rotary.scaling == "yarn":
        parameters["beta_fast"] = rotary.beta_fast
        parameters["beta_slow"] = rotary.beta_slow
        parameters["truncate"] = rotary.truncate
        parameters["attention_factor"] = rotary.amplitude
    return parameters
