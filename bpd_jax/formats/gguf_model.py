"""Models in GGUF files."""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import jax
import numpy as np

from bpd_jax.base.errors import UserError, naming
from bpd_jax.decoding.pretrained_checkpoint import Checkpoint, Origin, Path
from bpd_jax.formats.generation_settings import generation_settings, name_sampling
from bpd_jax.formats.gguf_file import GGUFFile
from bpd_jax.formats.gguf_options import (
    FAMILIES,
    ROTARY_TENSORS,
    read_rotary,
    read_variant,
)
from bpd_jax.formats.gguf_tokenizer import read_tokenizer
from bpd_jax.formats.json_files import Fields
from bpd_jax.formats.trunk_layouts import gpt2_layout, llama_layout
from bpd_jax.models.quantized import QuantizedMatrix
from bpd_jax.models.transformer_config import TransformerConfig

# `llama` is also the architecture of Mistral and SmolLM, `phi3` that of Phi-4.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2", *FAMILIES)

# Those whose rotary positions rotate pairs of neighbours in GGUF files.
_INTERLEAVED = ("llama", "smollm3", "granite")


def open_gguf(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a GGUF file and checks that its model is complete."""
    file = GGUFFile(path)
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{path} contains a model of architecture {architecture!r}; "
            f"{', '.join(ARCHITECTURES)} are supported."
        )
    with naming(path):
        config = _read_config(file, architecture)
    tensors = GGUFTensors(file, architecture, config)
    if architecture == "gpt2":
        layout = gpt2_layout(config)
    else:
        layout = llama_layout(config, variant=read_variant(file, architecture))
    tensors.check(layout)
    text = read_tokenizer(file, config.vocab_size)
    suppressed = file.find("tokenizer.ggml.suppress_tokens", np.ndarray)
    generation = {} if suppressed is None else {"suppress_tokens": suppressed.tolist()}
    name_sampling(str(path), file.starting_with("general.sampling."))
    return Checkpoint(
        config=config,
        layout=layout,
        tensors=tensors,
        generation=generation_settings(
            Fields(generation, str(path)), config.vocab_size
        ),
        **text._asdict(),
    )


class GGUFTensors:
    """The tensors of a GGUF file, in Hugging Face's names, shapes and order."""

    def __init__(
        self, file: GGUFFile, architecture: str, config: TransformerConfig
    ) -> None:
        self._file = file
        self._architecture = architecture
        self._config = config
        self._names = gguf.get_tensor_name_map(
            gguf.MODEL_ARCH[architecture.upper()], config.num_layers
        )

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32."""
        return self._restore(name)(self._file.read(self._stored_name(name)))

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """Returns a matrix `[output, input]` in its blocks; None if it has none.

        Those of GPT-2, which are transposes of Hugging Face's tensors, are expanded.
        """
        restore = self._restore(name)
        if restore is np.transpose:
            return None
        return jax.tree.map(restore, self._file.quantized(self._stored_name(name)))

    def check(self, layout: Mapping[Path, Origin]) -> None:
        """Checks names and shapes of all tensors, without reading any."""
        unused = set(self._file.tensors) - ROTARY_TENSORS
        for origin in layout.values():
            stored = self._stored_name(origin.name)
            shape = self._file.shape(stored)
            expected = origin.shape
            if self._restore(origin.name) is np.transpose:
                expected = expected[::-1]
            if shape != expected:
                raise UserError(
                    f"{self._file.path}: tensor {stored} has shape {list(shape)}, but "
                    f"the file's header requires {list(expected)}: convert it again."
                )
            unused.discard(stored)
        if unused:
            raise UserError(
                f"{self._file.path}: tensor {min(unused)} belongs to a variant of "
                f"{self._architecture} that is not supported."
            )

    def _stored_name(self, name: str) -> str:
        """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
        return self._names.get_name(name, (".weight", ".bias")) or name

    def _restore(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """The inverse of the change that the converter to GGUF made to a tensor."""
        if self._architecture == "gpt2":
            # Only Hugging Face's GPT-2 has matrices [input, output].
            is_matrix = re.search(r"\.c_(attn|proj|fc)\.weight$", name)
            return np.transpose if is_matrix else np.asarray
        if self._architecture in _INTERLEAVED:
            if "self_attn.q_proj" in name:
                return lambda tensor: _halves(tensor, self._config.num_heads)
            if "self_attn.k_proj" in name:
                return lambda tensor: _halves(tensor, self._config.kv_heads)
        return np.asarray


def _halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the features of each head, which are the first axis.

    GGUF's llama rotates pairs of neighbours, bpd_jax pairs (i, i + H/2):

        stored  a0 b0 a1 b1 a2 b2   becomes   a0 a1 a2 b0 b1 b2
    """
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _read_config(file: GGUFFile, architecture: str) -> TransformerConfig:
    """Reads the configuration of the trunk."""

    def size(key: str) -> int:
        return file.get(f"{architecture}.{key}", int)

    d_model, num_heads = size("embedding_length"), size("attention.head_count")
    max_length = size("context_length")
    window = file.find(f"{architecture}.attention.sliding_window", int)
    learned = architecture == "gpt2"
    norm = "norm_epsilon" if learned else "norm_rms_epsilon"
    shared: dict[str, Any] = {
        "vocab_size": file.shape("token_embd.weight")[0],
        "num_layers": size("block_count"),
        "d_model": d_model,
        "d_ff": size("feed_forward_length"),
        "num_heads": num_heads,
        "max_length": max_length,
        "norm_epsilon": file.get(f"{architecture}.attention.layer_{norm}", float),
        "tied_softmax": "output.weight" not in file.tensors,
    }
    if learned:
        return TransformerConfig(**shared)
    kv_heads = file.find(f"{architecture}.attention.head_count_kv", int) or num_heads
    width = file.find(f"{architecture}.attention.key_length", int)
    head_width = width or d_model // max(num_heads, 1)
    rotated = f"{architecture}.rope.dimension_count"
    if architecture in _INTERLEAVED and (
        file.find(rotated, int) not in (None, head_width)
    ):
        raise UserError(
            f"{file.path}: {rotated} is not the heads' width, {head_width}: convert "
            "the model again."
        )
    rotary = read_rotary(file, architecture, head_width)
    if rotary.scaling == "longrope" and rotary.original_length is not None:
        # All positions of longer texts would have other frequencies.
        shared["max_length"] = min(max_length, rotary.original_length)
    options: dict[str, Any] = {
        "num_kv_heads": kv_heads,
        "head_dim": None if head_width * num_heads == d_model else head_width,
        "activation": "silu",
        "gated": True,
        "use_bias": False,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors or None,
        "output_bias": "blk.0.attn_output.bias" in file.tensors or None,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors or None,
        "query_key_norm": architecture == "qwen3",
        "norm": "rms",
        "rotary": rotary,
        "window": window if window and window < max_length else None,
    }
    if architecture in FAMILIES:
        options |= FAMILIES[architecture](file, shared, window)
    return TransformerConfig(**shared, **options)
