"""Reads rotary positions from the config.json of a Hugging Face folder."""

import math
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.formats.json_files import Fields
from bpd_jax.models.rotary import RotaryConfig

# Positions are int32.
_LAST_POSITION = 2**31 - 1

# Kinds of layers: without a sliding window, and with one.
FULL, WINDOWED = "full_attention", "sliding_attention"

# Types of rotary positions by the names that the first files have (Phi-3).
_OLDER_NAMES = {"su": "longrope"}


def window_rotary_config(fields: Fields) -> RotaryConfig:
    """Reads the rotary positions of layers with a sliding window (Gemma 3).

    Older files have their base as `rope_local_base_freq`.
    """
    own = fields.fields("rope_parameters").fields(WINDOWED).values
    base = fields.number("rope_local_base_freq", 10000.0)
    plain = {
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rope_parameters": {"rope_theta": base, **own},
    }
    return rotary_config(Fields(plain, fields.source))[0]


def rope_parameters(fields: Fields, layers: str = FULL) -> Fields:
    """The settings of rotary positions, of one kind of layers where kinds differ.

    Older files have them in `rope_scaling`, newer ones in `rope_parameters`.
    """
    name = "rope_scaling" if "rope_scaling" in fields else "rope_parameters"
    scaling = fields.fields(name)
    if layers in scaling:
        scaling = scaling.fields(layers)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise UserError(
            f"{scaling.source} differs between layers, which is not supported."
        )
    return scaling


def rotary_config(fields: Fields, layers: str = FULL) -> tuple[RotaryConfig, int]:
    """Reads rotary positions of one kind of layers, and the length of the longest text.

    Older files have `rope_theta` beside the other settings.
    """
    scaling = rope_parameters(fields, layers)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    kind = _OLDER_NAMES.get(kind, kind)
    limit = fields.integer("max_position_embeddings")
    if limit < 1:
        raise UserError(f"max_position_embeddings in {fields.source} must be above 0.")
    # Vicuna states the scaling of its positions in this way.
    longest = max(limit, fields.integer("max_sequence_length", limit))
    original = fields.integer(
        "original_max_position_embeddings",
        scaling.integer("original_max_position_embeddings", limit),
    )
    base = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    fraction = scaling.number(
        "partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)
    )
    if kind not in ("default", "dynamic", "linear", "llama3", "yarn", "longrope"):
        raise UserError(
            f"{scaling.source} has rotary positions of type {kind!r}, which are not "
            "supported: choose one of default, linear, dynamic, llama3, yarn and "
            "longrope."
        )
    if kind in ("default", "dynamic"):
        length = longest if kind == "default" else min(limit, original)
        return RotaryConfig(base, fraction), length
    extended = kind in ("yarn", "longrope")
    factor = scaling.number("factor", limit / max(original, 1) if extended else None)
    options: dict[str, Any] = {} if kind == "linear" else {"original_length": original}
    if kind == "llama3":
        options["low_factor"] = scaling.number("low_freq_factor")
        options["high_factor"] = scaling.number("high_freq_factor")
    if kind == "yarn":
        options |= {
            "beta_fast": scaling.number("beta_fast", 32.0) or 32.0,
            "beta_slow": scaling.number("beta_slow", 1.0) or 1.0,
            "truncate": scaling.flag("truncate", True),
            "attention_factor": _attention_factor(scaling, factor),
        }
        # If the limit is the original length, the factor gives the extended one.
        longest = max(longest, int(min(original * factor, _LAST_POSITION)))
    if kind == "longrope":
        options["attention_factor"] = scaling.values.get("attention_factor")
        options["divisors"] = tuple(scaling.items("short_factor"))
        # All positions of longer texts would have other frequencies.
        longest = min(longest, original)
    return RotaryConfig(base, fraction, kind, factor, **options), longest


def _attention_factor(scaling: Fields, factor: float) -> float:
    """The attention factor of yarn; with DeepSeek's two scales a quotient."""

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    above, below = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if growth(below) <= 0 or growth(above) <= 0:
        raise UserError(
            f"mscale and mscale_all_dim in {scaling.source} must not be so far below 0."
        )
    default = growth(above) / growth(below) if above and below else growth(1.0)
    return scaling.number("attention_factor", default)
