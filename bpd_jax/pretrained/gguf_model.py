"""Models in GGUF files: llama (also Mistral and SmolLM), qwen2, qwen3, gpt2."""

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tokenizers

from bpd_jax.errors import UserError
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.pretrained.gguf_file import GGUFFile
from bpd_jax.pretrained.gguf_rotary import FACTORS, read_rotary
from bpd_jax.pretrained.gguf_tokenizer import read_tokenizer
from bpd_jax.pretrained.gpt2_layout import gpt2_layout
from bpd_jax.pretrained.llama_layout import Origin, Path, llama_layout
from bpd_jax.pretrained.pretrained_checkpoint import Checkpoint

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")

# From the names of Hugging Face's modules to those of GGUF.
_LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_IN_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")


def open_gguf(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a GGUF file and checks that its model is complete.

    Raises:
      UserError: the file is missing, damaged, or not supported.
    """
    file = GGUFFile(path)
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{path} contains a model of architecture {architecture!r}; "
            f"{', '.join(ARCHITECTURES)} are supported."
        )
    config = _read_config(file, architecture)
    tensors = GGUFTensors(file, architecture, config)
    layout = gpt2_layout(config) if architecture == "gpt2" else llama_layout(config)
    tensors.check(layout)
    text = read_tokenizer(file, config.vocab_size)
    return Checkpoint(
        name=file.path.stem,
        config=config,
        layout=layout,
        tensors=tensors,
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        begin_of_text=text.begin_of_text,
        begin_text=_begin_text(file, text.tokenizer),
        end_tokens=text.end_tokens,
    )


def _begin_text(file: GGUFFile, tokenizer: tokenizers.Tokenizer) -> str:
    id = file.find("tokenizer.ggml.bos_token_id", int)
    if id is None or not 0 <= id < tokenizer.get_vocab_size():
        return ""
    return tokenizer.id_to_token(id) or ""


class GGUFTensors:
    """The tensors of a GGUF file, in Hugging Face's names, shapes and order."""

    def __init__(
        self, file: GGUFFile, architecture: str, config: TransformerConfig
    ) -> None:
        self._file = file
        self._architecture = architecture
        self._config = config
        self._names = _GPT2_NAMES if architecture == "gpt2" else _LLAMA_NAMES

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32.

        Raises:
          UserError: the file has none of this name.
        """
        return self._restore(name)(self._file.read(self._stored_name(name)))

    def check(self, layout: Mapping[Path, Origin]) -> None:
        """Checks names and shapes of all tensors, without reading any.

        Raises:
          UserError: one is missing or of another shape, or the file has one that the
            layout does not use.
        """
        unused = set(self._file.tensors) - {FACTORS}
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
        module, _, kind = name.rpartition(".")
        match = _IN_LAYER.fullmatch(module)
        if match is None:
            return f"{self._names.get(module, module)}.{kind}"
        return f"blk.{match[1]}.{self._names.get(match[2], match[2])}.{kind}"

    def _restore(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """The inverse of the change that the converter to GGUF made to a tensor."""
        if self._architecture == "gpt2":
            # Only Hugging Face's GPT-2 has matrices [input, output].
            is_matrix = re.search(r"\.c_(attn|proj|fc)\.weight$", name)
            return np.transpose if is_matrix else np.asarray
        if self._architecture == "llama" and "self_attn.q_proj" in name:
            return lambda tensor: _halves(tensor, self._config.num_heads)
        if self._architecture == "llama" and "self_attn.k_proj" in name:
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
        value = file.get(f"{architecture}.{key}", int)
        if value < 1:
            raise UserError(
                f"{file.path}: {architecture}.{key} cannot be {value}: convert the "
                "model again."
            )
        return value

    num_layers, d_model = size("block_count"), size("embedding_length")
    num_heads, max_length = size("attention.head_count"), size("context_length")
    if num_layers > len(file.tensors):
        raise UserError(
            f"{file.path} declares {num_layers:,} layers but has only "
            f"{len(file.tensors):,} tensors: it is damaged; download it again."
        )
    window = file.find(f"{architecture}.attention.sliding_window", int)
    if window:
        # Texts within one window are exact; longer ones would attend beyond it.
        max_length = min(max_length, window)
    learned = architecture == "gpt2"
    norm = "norm_epsilon" if learned else "norm_rms_epsilon"
    epsilon = file.get(f"{architecture}.attention.layer_{norm}", float)
    if not 0 < epsilon < math.inf:
        raise UserError(f"{file.path}: its {norm} cannot be {epsilon}.")
    shared: dict[str, Any] = {
        "vocab_size": file.shape("token_embd.weight")[0],
        "num_layers": num_layers,
        "d_model": d_model,
        "d_ff": size("feed_forward_length"),
        "num_heads": num_heads,
        "max_length": max_length,
        "norm_epsilon": epsilon,
        "tied_softmax": "output.weight" not in file.tensors,
    }
    if learned:
        return TransformerConfig(**shared)
    kv_heads = file.find(f"{architecture}.attention.head_count_kv", int) or num_heads
    width = file.find(f"{architecture}.attention.key_length", int)
    head_width = width or d_model // num_heads
    if architecture == "llama" and (
        file.find("llama.rope.dimension_count", int) not in (None, head_width)
    ):
        raise UserError(
            f"{file.path}: llama.rope.dimension_count is not the heads' width, "
            f"{head_width}: convert the model again."
        )
    return TransformerConfig(
        **shared,
        num_kv_heads=kv_heads,
        head_dim=None if head_width * num_heads == d_model else head_width,
        activation="silu",
        gated=True,
        use_bias=False,
        qkv_bias="blk.0.attn_q.bias" in file.tensors or None,
        output_bias="blk.0.attn_output.bias" in file.tensors or None,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors or None,
        query_key_norm=architecture == "qwen3",
        norm="rms",
        rotary=read_rotary(file, architecture, head_width),
    )
