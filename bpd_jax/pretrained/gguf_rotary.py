"""Reads the rotary positions of a model from its GGUF file."""

import dataclasses
import math

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.pretrained.gguf_file import GGUFFile

FACTORS = "rope_freqs.weight"
_SHORT = "rope_factors_short.weight"
ROTARY_TENSORS = frozenset({FACTORS, _SHORT, "rope_factors_long.weight"})

# In `llama3` scaling only the ratios of lengths matter; this is Llama 3's length.
_ORIGINAL_LENGTH = 8192


def read_rotary(file: GGUFFile, architecture: str, head_width: int) -> RotaryConfig:
    """Returns the configuration of rotary positions.

    Args:
      file: the checkpoint.
      architecture: prefix of the keys.
      head_width: H.

    Raises:
      UserError: their scaling is not supported.
    """
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
            original_length=file.find(f"{prefix}.scaling.original_context_length", int)
            or file.get(f"{architecture}.context_length", int),
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
            original_length=file.find(f"{prefix}.scaling.original_context_length", int)
            or file.get(f"{architecture}.context_length", int),
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
    if not (np.isfinite(factors).all() and (factors >= 1).all()):
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
