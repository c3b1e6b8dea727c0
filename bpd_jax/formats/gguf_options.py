"""Options of the transformer, and rotary positions, that GGUF files describe.

Numbers that the files lack are those of llama.cpp.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.formats.gguf_file import GGUFFile
from bpd_jax.formats.trunk_layouts import Variant
from bpd_jax.models.rotary import RotaryConfig

Options = dict[str, Any]

FACTORS = "rope_freqs.weight"
_SHORT = "rope_factors_short.weight"
ROTARY_TENSORS = frozenset({FACTORS, _SHORT, "rope_factors_long.weight"})

# In `llama3` scaling only the ratios of lengths matter; this is Llama 3's length.
_ORIGINAL_LENGTH = 8192

# The window of Gemma 2.
_WINDOW = 4096

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
        **_gemma(file, sizes, _WINDOW if window is None else window, "gemma2", 2),
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


def _granite(file: GGUFFile, sizes: Mapping[str, Any], window: int | None) -> Options:
    del window

    def scale(name: str) -> float | None:
        return file.find(f"granite.{name}", float) or None

    rotates = file.find("granite.rope.scaling.finetuned", bool) is not False
    layers = tuple(range(min(sizes["num_layers"], 1001)))
    return {
        "unrotated_layers": () if rotates else layers,
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
    joint = {"query_key_norm": True, "joint_query_key_norm": True}
    return {**joint, "norm_place": "after"}


FAMILIES: dict[str, Callable[[GGUFFile, Mapping[str, Any], int | None], Options]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "smollm3": lambda file, sizes, window: {
        "unrotated_layers": tuple(range(3, min(sizes["num_layers"], 1001), 4))
    },
    "phi3": lambda file, sizes, window: {},
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
        divisor = file.get("granite.logit_scale", float)
        if divisor <= 0:
            raise UserError(f"{file.path}: granite.logit_scale must be above 0.")
        return Variant(logit_divisor=divisor)
    return Variant()


def read_rotary(file: GGUFFile, architecture: str, head_width: int) -> RotaryConfig:
    """Returns the configuration of rotary positions."""
    prefix = f"{architecture}.rope"
    base = file.find(f"{prefix}.freq_base", float) or 10000.0
    rotated = file.find(f"{prefix}.dimension_count", int) or head_width
    if not 0 < rotated <= head_width or rotated % 2:
        raise UserError(
            f"{file.path}: {prefix}.dimension_count cannot be {rotated} for heads "
            f"of width {head_width}: convert the model again."
        )
    plain = RotaryConfig(base, fraction=rotated / head_width)

    def scaling(name: str) -> float | None:
        return file.find(f"{prefix}.scaling.{name}", float)

    kind = file.find(f"{prefix}.scaling.type", str)
    length = file.find(f"{prefix}.scaling.original_context_length", int)
    length = length or file.get(f"{architecture}.context_length", int)
    # Older files have the factor under another name, and without a type.
    factor = scaling("factor") or file.find(f"{prefix}.scale_linear", float) or 1.0
    if FACTORS in file.tensors and (kind == "yarn" or (kind != "none" and factor != 1)):
        raise UserError(
            f"{file.path}: {FACTORS} together with the scaling in {prefix}.scaling is "
            "not supported."
        )
    if kind == "yarn":
        if scaling("yarn_log_multiplier"):
            raise UserError(
                f"{file.path}: {prefix}.scaling.yarn_log_multiplier is not supported."
            )
        attention = scaling("yarn_attn_factor") or scaling("attn_factor") or 1.0
        return dataclasses.replace(
            plain,
            scaling="yarn",
            factor=factor,
            original_length=length,
            beta_fast=scaling("yarn_beta_fast") or plain.beta_fast,
            beta_slow=scaling("yarn_beta_slow") or plain.beta_slow,
            # The factor in the file is relative to the default factor.
            attention_factor=None
            if attention == 1
            else attention * (0.1 * math.log(max(factor, 1.0)) + 1),
        )
    if _SHORT in file.tensors:
        return dataclasses.replace(
            plain,
            scaling="longrope",
            original_length=length,
            attention_factor=scaling("attn_factor") or 1.0,
            divisors=tuple(file.read(_SHORT).ravel().tolist()),
        )
    if kind not in (None, "none", "linear"):
        raise UserError(
            f"{file.path}: {prefix}.scaling.type {kind!r} is not supported; none, "
            "linear and yarn are."
        )
    if kind != "none" and factor != 1:
        return dataclasses.replace(plain, scaling="linear", factor=factor)
    if FACTORS not in file.tensors:
        return plain
    if file.shape(FACTORS) != (rotated // 2,):
        raise UserError(
            f"{file.path}: {FACTORS} has shape {list(file.shape(FACTORS))}, not "
            f"[{rotated // 2}]: convert the model again."
        )
    llama3 = _llama3(plain, head_width, file.read(FACTORS).astype(np.float64))
    if llama3 is None:
        raise UserError(
            f"{file.path}: the factors of {FACTORS} are not those of Llama 3's "
            "scaling, the only one that is supported."
        )
    return llama3


def _llama3(
    plain: RotaryConfig, head_width: int, factors: np.ndarray
) -> RotaryConfig | None:
    """Returns the `llama3` scaling that divides the frequencies by `factors`.

    With F the factor, a frequency f is multiplied by s + (1 - s) / F, where s rises
    linearly in f from 0 to 1 and is clipped there. So the steepest step between
    neighbours lies on the line, and the line gives the two lengths:

        factors   1    2    4    8      (F = 8)
        s         1    3/7  1/7  0
        f         0.8  0.4  0.2  0.1    the line meets 0 at 0.1 and 1 at 0.8
    """
    frequencies = plain.frequencies(head_width)
    if not (factors >= 1).all():
        return None
    factor = float(factors.max())
    if factor == factors.min():
        scaling = "none" if factor == 1 else "linear"
        return dataclasses.replace(plain, scaling=scaling, factor=factor)
    shares = (1 / factors - 1 / factor) / (1 - 1 / factor)
    slopes = np.diff(shares) / np.diff(frequencies)
    steepest = int(np.argmax(slopes))
    slope = slopes[steepest]
    if slope <= 0:
        return None
    zero = frequencies[steepest] - shares[steepest] / slope
    if zero <= 0:
        return None
    turns = _ORIGINAL_LENGTH / (2 * math.pi)
    candidate = dataclasses.replace(
        plain,
        scaling="llama3",
        factor=factor,
        original_length=_ORIGINAL_LENGTH,
        low_factor=float(np.float32(zero * turns)),
        high_factor=float(np.float32((zero + 1 / slope) * turns)),
    )
    expected = frequencies / factors
    same = np.allclose(candidate.frequencies(head_width), expected, rtol=1e-5, atol=0)
    return candidate if same else None
