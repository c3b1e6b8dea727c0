"""Options of the transformer that GGUF files of some architectures have.

Numbers that the files lack are those of llama.cpp.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.pretrained.gguf_file import GGUFFile
from bpd_jax.pretrained.llama_layout import Variant

Options = dict[str, Any]

# The layers of the models of 27 billion parameters, whose scale of attention differs.
_LARGEST = {"gemma2": 46, "gemma3": 62}


def _gemma(
    file: GGUFFile, sizes: Mapping[str, Any], window: int | None, name: str, every: int
) -> Options:
    """Gemma 2 and 3; one of `every` layers has no window."""
    width, layers = sizes["d_model"], sizes["num_layers"]
    head = file.find(f"{name}.attention.key_length", int)
    if head is None or layers == _LARGEST[name]:
        head = width // max(sizes["num_heads"], 1)
    options: Options = {
        "activation": "gelu",
        "norm_place": "both",
        "embedding_scale": math.sqrt(max(width, 0)),
        "attention_scale": max(head, 1) ** -0.5,
    }
    pattern = file.starting_with(f"{name}.attention.").get("sliding_window_pattern")
    numbers = range(min(layers, 1001))
    if isinstance(pattern, np.ndarray):
        windowed = [bool(pattern[n : n + 1].any()) for n in numbers]
    else:
        every = max(pattern, 1) if isinstance(pattern, int) else every
        windowed = [(n + 1) % every != 0 for n in numbers]
    if window and any(windowed):
        options["window"] = window
        options["windowed_layers"] = tuple(n for n in numbers if windowed[n])
    return options


def _gemma2(file: GGUFFile, sizes: Mapping[str, Any], window: int | None) -> Options:
    def cap(name: str, usual: float) -> float | None:
        value = file.find(f"gemma2.{name}_logit_softcapping", float)
        return (usual if value is None else value) or None

    return {
        **_gemma(file, sizes, window, "gemma2", 2),
        "attention_softcap": cap("attn", 50.0),
        "logit_softcap": cap("final", 30.0),
    }


def _gemma3(file: GGUFFile, sizes: Mapping[str, Any], window: int | None) -> Options:
    base = file.find("gemma3.rope.freq_base_swa", float)
    return {
        **_gemma(file, sizes, window, "gemma3", 6),
        "query_key_norm": True,
        "window_rotary": RotaryConfig(10000.0 if base is None else base),
        "logit_softcap": file.find("gemma3.final_logit_softcapping", float) or None,
    }


def _smollm3(file: GGUFFile, sizes: Mapping[str, Any], window: int | None) -> Options:
    del file, window
    return {"unrotated_layers": tuple(range(3, min(sizes["num_layers"], 1001), 4))}


def _phi3(file: GGUFFile, sizes: Mapping[str, Any], window: int | None) -> Options:
    del file, sizes, window
    return {}


def _granite(file: GGUFFile, sizes: Mapping[str, Any], window: int | None) -> Options:
    del sizes, window

    def scale(name: str) -> float | None:
        return file.find(f"granite.{name}", float) or None

    return {
        "embedding_scale": scale("embedding_scale") or 1.0,
        "attention_scale": scale("attention.scale"),
        "residual_scale": scale("residual_scale") or 1.0,
    }


def _olmo2(file: GGUFFile, sizes: Mapping[str, Any], window: int | None) -> Options:
    del sizes
    if window:
        raise UserError(
            f"{file.path} is OLMo 3, whose sliding windows are not supported."
        )
    return {
        "query_key_norm": True,
        "joint_query_key_norm": True,
        "norm_place": "after",
    }


FAMILIES: dict[str, Callable[[GGUFFile, Mapping[str, Any], int | None], Options]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
}
"""Reads further options from a file, the sizes of its model, and its window."""


def read_variant(file: GGUFFile, architecture: str) -> Variant:
    """Where the tensors of a file differ from Llama's.

    The weights of Gemma's norms need no offset: the converter to GGUF adds it.
    """
    if architecture == "phi3":
        return Variant(fused="blk.0.attn_qkv.weight" in file.tensors)
    if architecture == "granite":
        divisor = file.find("granite.logit_scale", float) or 1.0
        if divisor < 0:
            raise UserError(f"{file.path}: granite.logit_scale must be above 0.")
        return Variant(logit_divisor=divisor)
    return Variant()
