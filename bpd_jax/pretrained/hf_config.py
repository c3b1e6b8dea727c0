"""Converts the config.json of a Hugging Face folder to a `TransformerConfig`."""

import math
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.pretrained.json_files import Fields, naming

# Model types whose tensors have Llama's names, and GPT-2.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
GPT2 = "gpt2"

# Positions are int32.
_LAST_POSITION = 2**31 - 1

# Activations by their names there; plain `gelu` is not the tanh approximation.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}


def transformer_config(fields: Fields) -> TransformerConfig:
    """Converts config.json; missing fields have the defaults of transformers.

    The maximum length is the longest for which both models are equal: with rotary
    frequencies that change with the length of the text (`dynamic`) the length from
    which they change.

    Raises:
      UserError: the kind of model or one of its settings is not supported.
    """
    kind = fields.text("model_type")
    if "quantization_config" in fields:
        method = fields.fields("quantization_config").text("quant_method", "unknown")
        raise UserError(
            f"{fields.source} describes a quantised model ({method}): use the original "
            "model or a GGUF file."
        )
    with naming(fields.source):
        if kind == GPT2:
            return _gpt2(fields)
        if kind in LLAMA_LIKE:
            return _llama(fields, kind)
    raise UserError(
        f"{fields.source} describes a model of type {kind!r}, which is not supported: "
        f"choose one of type {', '.join(LLAMA_LIKE)} or {GPT2}."
    )


def _llama(fields: Fields, kind: str) -> TransformerConfig:
    width = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    if heads < 1:
        raise UserError(f"num_attention_heads in {fields.source} must be above 0.")
    head = fields.integer("head_dim", 128 if kind == "qwen3" else width // heads)
    rotary, max_length = rotary_config(fields)
    if rotary.fraction != 1:
        # transformers ignores it for these types, other programs do not.
        raise UserError(
            f"{fields.source} sets partial_rotary_factor, which models of type "
            f"{kind!r} do not have in transformers: remove it if the model was trained "
            "there."
        )
    # Llama and Qwen3 share one switch for all four projections; Qwen2 has none.
    bias = kind in ("llama", "qwen3") and fields.flag("attention_bias", False)
    return TransformerConfig(
        vocab_size=fields.integer("vocab_size"),
        num_layers=fields.integer("num_hidden_layers"),
        d_model=width,
        d_ff=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=None if head * heads == width else head,
        max_length=max_length,
        activation=activation_of(fields, fields.text("hidden_act", "silu")),
        gated=True,
        use_bias=False,
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias,
        mlp_bias=kind == "llama" and fields.flag("mlp_bias", False),
        query_key_norm=kind == "qwen3",
        norm="rms",
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        rotary=rotary,
        tied_softmax=fields.flag("tie_word_embeddings", False),
        **_windows(fields, kind, max_length),
    )


def _gpt2(fields: Fields) -> TransformerConfig:
    for name, usual in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if fields.flag(name, usual) != usual:
            raise UserError(
                f"{fields.source} sets {name}, which GPT-2 does not use and which is "
                "not supported."
            )
    width = fields.integer("n_embd")
    return TransformerConfig(
        vocab_size=fields.integer("vocab_size"),
        num_layers=fields.integer("n_layer"),
        d_model=width,
        d_ff=fields.integer("n_inner", 4 * width),
        num_heads=fields.integer("n_head"),
        max_length=fields.integer("n_positions"),
        activation=activation_of(
            fields, fields.text("activation_function", "gelu_new")
        ),
        norm_epsilon=fields.number("layer_norm_epsilon", 1e-5),
        tied_softmax=fields.flag("tie_word_embeddings", True),
    )


def activation_of(fields: Fields, name: str) -> str:
    """The name of an activation in `TransformerConfig`."""
    if name not in _ACTIVATIONS:
        raise UserError(
            f"{fields.source} has the activation {name!r}, which is not supported: "
            f"choose one of {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def _windows(fields: Fields, kind: str, max_length: int) -> dict[str, Any]:
    """The sliding window, and the layers that have it if not all do."""
    if kind == "llama":
        return {}
    if kind == "mistral":
        # Only null disables it.
        if fields.values.get("sliding_window", 4096) is None:
            return {}
        layers = None
    else:
        if not fields.flag("use_sliding_window", False):
            return {}
        number = fields.integer("num_hidden_layers")
        kinds = fields.items("layer_types") or ["sliding_attention"] * number
        if "layer_types" not in fields:
            full = fields.integer("max_window_layers", 28)
            kinds = ["full_attention"] * min(full, number) + kinds[full:]
        layers = tuple(
            layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"
        )
        if not layers:
            return {}
    window = fields.integer("sliding_window", 4096)
    if window >= max_length:
        return {}
    if layers is not None and len(layers) == fields.integer("num_hidden_layers"):
        layers = None
    return {"window": window, "windowed_layers": layers}


def rotary_config(fields: Fields) -> tuple[RotaryConfig, int]:
    """Reads rotary positions, and the length of the longest text.

    Older files have `rope_theta` and `rope_scaling`, newer ones all in
    `rope_parameters`.
    """
    name = "rope_scaling" if "rope_scaling" in fields else "rope_parameters"
    scaling = fields.fields(name)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise UserError(
            f"{scaling.source} differs between layers, which is not supported."
        )
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    limit = fields.integer("max_position_embeddings")
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
    if kind == "default":
        return RotaryConfig(base, fraction), longest
    if kind == "dynamic":
        return RotaryConfig(base, fraction), min(limit, original)
    if kind == "linear":
        factor = scaling.number("factor")
        return RotaryConfig(base, fraction, "linear", factor), longest
    if kind == "llama3":
        rotary = RotaryConfig(
            base,
            fraction,
            "llama3",
            scaling.number("factor"),
            original,
            low_factor=scaling.number("low_freq_factor"),
            high_factor=scaling.number("high_freq_factor"),
        )
        return rotary, longest
    if kind == "yarn":
        factor = scaling.number("factor", limit / max(original, 1))
        rotary = RotaryConfig(
            base,
            fraction,
            "yarn",
            factor,
            original,
            beta_fast=scaling.number("beta_fast", 32.0) or 32.0,
            beta_slow=scaling.number("beta_slow", 1.0) or 1.0,
            truncate=scaling.flag("truncate", True),
            attention_factor=_attention_factor(scaling, factor),
        )
        # If the limit is the original length, the factor gives the extended one.
        return rotary, max(longest, int(min(original * factor, _LAST_POSITION)))
    raise UserError(
        f"{scaling.source} has rotary positions of type {kind!r}, which are not "
        "supported: choose one of default, linear, dynamic, llama3 and yarn."
    )


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
