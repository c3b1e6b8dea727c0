"""Tiny GGUF files in the format of llama.cpp's converter."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import pytest

from bpd_jax.formats.trunk_layouts import Variant, gpt2_layout, llama_layout
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import LLAMA

# Architectures whose rotary positions rotate pairs of neighbours.
INTERLEAVED = ("llama", "smollm3", "granite")

F32 = gguf.GGMLQuantizationType.F32

# A vocabulary that can write any text, with one merge and two control tokens.
ALPHABET = [
    chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))
]
TOKENS = ["<end>", "<begin>", *ALPHABET, "he"]


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """A model of random weights, which have Hugging Face's names and layout."""

    architecture: str
    config: TransformerConfig
    weights: Mapping[str, np.ndarray]

    @classmethod
    def make(cls, architecture: str, **changes: Any) -> "TinyModel":
        """Three query heads of width 8 and one key-value head, changed by `changes`."""
        sizes = {
            "vocab_size": len(TOKENS),
            "num_layers": 2,
            "d_model": 24,
            "d_ff": 40,
            "num_heads": 3,
            "max_length": 64,
        }
        if architecture == "gpt2":
            config = TransformerConfig(**{**sizes, **changes})
            layout = gpt2_layout(config)
        else:
            sizes |= {**LLAMA, "num_kv_heads": 1, "rotary": RotaryConfig(5000.0)}
            config = TransformerConfig(**{**sizes, **changes})
            layout = llama_layout(config, variant=Variant(fused=architecture == "phi3"))
        random = np.random.default_rng(0)
        weights = {
            origin.name: random.normal(0, 0.3, origin.shape).astype(np.float32)
            for origin in sorted(layout.values(), key=lambda origin: origin.name)
        }
        return cls(architecture, config, weights)

    def read(self, name: str) -> np.ndarray:
        return self.weights[name]

    def values(self) -> dict[str, Any]:
        """The metadata of its file."""
        config = self.config
        metadata = {
            "context_length": config.max_length,
            "embedding_length": config.d_model,
            "block_count": config.num_layers,
            "feed_forward_length": config.d_ff,
            "attention.head_count": config.num_heads,
        }
        if config.rotary is None:
            metadata["attention.layer_norm_epsilon"] = config.norm_epsilon
        else:
            metadata["attention.layer_norm_rms_epsilon"] = config.norm_epsilon
            metadata["attention.head_count_kv"] = config.kv_heads
            metadata["rope.freq_base"] = config.rotary.base
            metadata["attention.key_length"] = config.head_dim
        values = {f"{self.architecture}.{key}": x for key, x in metadata.items()}
        return {**values, **tokenizer_values()}

    def stored(self) -> dict[str, np.ndarray]:
        """Its tensors by GGUF's names, in the layout of llama.cpp's converter."""
        config = self.config
        names = gguf.get_tensor_name_map(
            gguf.MODEL_ARCH[self.architecture.upper()], config.num_layers
        )
        tensors = {}
        for name, tensor in self.weights.items():
            heads = {"q_proj": config.num_heads, "k_proj": config.kv_heads}
            part = name.split(".")[-2]
            if self.architecture in INTERLEAVED and part in heads:
                shape = (heads[part], 2, config.head_width // 2, *tensor.shape[1:])
                tensor = tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)
            if self.architecture == "gpt2" and part.startswith("c_"):
                tensor = tensor.T
            stored = names.get_name(name, (".weight", ".bias"))
            assert stored is not None, name
            tensors[stored] = tensor
        return tensors

    def write(
        self,
        path: pathlib.Path,
        values: Mapping[str, Any] | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
        kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    ) -> pathlib.Path:
        """Writes the file; adds `values` and `tensors`, and omits None."""
        values = {**self.values(), **(values or {})}
        tensors = {**self.stored(), **(tensors or {})}
        return write_gguf(path, self.architecture, values, tensors, kinds or {})


def tokenizer_values() -> dict[str, Any]:
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [control] * 2 + [normal] * (len(TOKENS) - 2),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    }


def write_gguf(
    path: pathlib.Path,
    architecture: str,
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, gguf.GGMLQuantizationType],
) -> pathlib.Path:
    """Writes a GGUF file; values and tensors that are None are omitted.

    An int becomes uint32. Tensors are quantised to `kinds`, by default F32; raw blocks
    are given as uint8.
    """
    writer = gguf.GGUFWriter(path, architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32}
    add |= {float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in values.items():
        if value is not None:
            add[type(value)](key, value)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        kind = kinds.get(name, F32)
        raw = tensor if tensor.dtype == np.uint8 else gguf.quants.quantize(tensor, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny() -> type[TinyModel]:
    """The class above: test files cannot import each other."""
    return TinyModel
