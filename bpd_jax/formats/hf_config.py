"""Converts the config.json of a Hugging Face folder to a `TransformerConfig`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bpd_jax.base.errors import UserError, naming
from bpd_jax.formats.hf_rotary import rotary_config, window_rotary_config
from bpd_jax.formats.json_files import Fields
from bpd_jax.formats.trunk_layouts import Variant
from bpd_jax.models.transformer_config import TransformerConfig

GPT2 = "gpt2"

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

Options = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Family:
    """Where the models of a type differ from Llama.

    Attributes:
      defaults: values of absent fields in transformers, where Llama has others.
      biases: the switches of biases that the type has: of attention, and of the
        feed-forward layers.
      options: reads further options of the transformer.
      fixed: further options that all models of the type have.
      partial_rotary: whether a part of the features of a head may be rotated.
    """

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    biases: tuple[str, ...] = ()
    options: Callable[[Fields], Options] = lambda fields: {}
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    partial_rotary: bool = False


def _windows(fields: Fields, windowed: Sequence[bool] | None = None) -> Options:
    """The sliding window, and the layers that have it if not all do.

    `windowed` says whether each layer has it, unless the configuration has
    `layer_types`; None for windows in all layers.
    """
    if "sliding_window" not in fields:
        return {}
    layers = None
    if windowed is not None:
        if "layer_types" in fields:
            kinds = fields.items("layer_types")
            windowed = [kind == "sliding_attention" for kind in kinds]
        layers = tuple(n for n in _layers(fields) if windowed[n:][:1] == [True])
        if not layers:
            return {}
        layers = None if len(layers) == len(_layers(fields)) else layers
    return {"window": fields.integer("sliding_window"), "windowed_layers": layers}


def _layers(fields: Fields) -> range:
    """The numbers of the layers, of which no model has more than a thousand."""
    return range(min(fields.integer("num_hidden_layers"), 1001))


def _qwen3_moe(fields: Fields) -> Options:
    if fields.flag("use_sliding_window", False):
        raise UserError(
            f"{fields.source} sets use_sliding_window, which is not supported for "
            "qwen3_moe: use a model without a window."
        )
    if fields.integer("decoder_sparse_step", 1) != 1 or fields.items("mlp_only_layers"):
        raise UserError(
            f"{fields.source} has layers without experts (decoder_sparse_step, "
            "mlp_only_layers), which is not supported: use a model with experts in "
            "every layer."
        )
    return {
        "d_ff": fields.integer("moe_intermediate_size"),
        "experts": fields.integer("num_experts", fields.integer("num_local_experts")),
        "chosen_experts": fields.integer("num_experts_per_tok"),
        "normalised_experts": fields.flag("norm_topk_prob", False),
    }


def _switched_windows(fields: Fields) -> Options:
    if not fields.flag("use_sliding_window", False):
        return {}
    full = fields.integer("max_window_layers", 28)
    return _windows(fields, [layer >= full for layer in _layers(fields)])


def _smollm3(fields: Fields) -> Options:
    step = max(fields.integer("no_rope_layer_interval"), 1)
    rotated = fields.items("no_rope_layers") or [
        int((layer + 1) % step != 0) for layer in _layers(fields)
    ]
    options: Options = {
        "unrotated_layers": tuple(n for n, one in enumerate(rotated) if one == 0)
    }
    if fields.flag("use_sliding_window", False):
        options |= _windows(fields, [one == 0 for one in rotated])
    return options


def _granite(fields: Fields) -> Options:
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
    }


def _gemma2(fields: Fields) -> Options:
    if fields.flag("use_bidirectional_attention", False):
        raise UserError(
            f"{fields.source} sets use_bidirectional_attention: the model embeds texts "
            "and does not generate any."
        )
    scalar = fields.number("query_pre_attn_scalar")
    if scalar <= 0:
        raise UserError(f"query_pre_attn_scalar in {fields.source} must be above 0.")
    options: Options = {
        "activation": activation_of(fields, fields.text("hidden_activation")),
        "norm_place": "both",
        "embedding_scale": math.sqrt(max(fields.integer("hidden_size"), 1)),
        "attention_scale": scalar**-0.5,
    }
    for option, name in (
        ("attention_softcap", "attn_logit_softcapping"),
        ("logit_softcap", "final_logit_softcapping"),
    ):
        if name in fields:
            options[option] = fields.number(name)
    every = max(fields.integer("sliding_window_pattern"), 1)
    windowed = [(layer + 1) % every != 0 for layer in _layers(fields)]
    return options | _windows(fields, windowed)


def _gemma3(fields: Fields) -> Options:
    return {
        **_gemma2(fields),
        "query_key_norm": True,
        "window_rotary": window_rotary_config(fields),
    }


_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2 = {
    **_GEMMA,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window_pattern": 2,
}
_GEMMA3 = {
    **_GEMMA,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "sliding_window_pattern": 6,
}

# Settings that null turns off; elsewhere it stands for the default.
_OFF = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")

_ATTENTION, _MLP = "attention_bias", "mlp_bias"
_FAMILIES = {
    "llama": _Family(biases=(_ATTENTION, _MLP)),
    "mistral": _Family({"sliding_window": 4096}, (), _windows),
    "qwen2": _Family(
        {"sliding_window": 4096}, (), _switched_windows, {"qkv_bias": True}
    ),
    "qwen3": _Family(
        {"sliding_window": 4096, "head_dim": 128},
        (_ATTENTION,),
        _switched_windows,
        {"query_key_norm": True},
    ),
    "qwen3_moe": _Family(
        {
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
        },
        (_ATTENTION,),
        _qwen3_moe,
        {"query_key_norm": True},
    ),
    "gemma2": _Family(_GEMMA2, (_ATTENTION,), _gemma2),
    "gemma3_text": _Family(_GEMMA3, (_ATTENTION,), _gemma3),
    "smollm3": _Family(
        {
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        (_ATTENTION, _MLP),
        _smollm3,
    ),
    "phi3": _Family({"rms_norm_eps": 1e-5}, (), _windows, partial_rotary=True),
    "granite": _Family({}, (_ATTENTION, _MLP), _granite),
    "olmo2": _Family(
        {"rms_norm_eps": 1e-5},
        (_ATTENTION,),
        fixed={
            "query_key_norm": True,
            "joint_query_key_norm": True,
            "norm_place": "after",
        },
    ),
}

# Model types whose tensors have Llama's names.
LLAMA_LIKE = tuple(_FAMILIES)


def variant_of(fields: Fields) -> Variant:
    """Where the tensors of a folder differ from Llama's."""
    kind, divisor = fields.text("model_type"), 1.0
    if kind == "granite":
        divisor = fields.number("logits_scaling", 1.0)
    if divisor <= 0:
        raise UserError(f"logits_scaling in {fields.source} must be above 0.")
    offset = 1.0 if kind in ("gemma2", "gemma3_text") else 0.0
    return Variant(kind == "phi3", offset, divisor)


def text_model(fields: Fields) -> Fields:
    """The fields of the text model of a folder: Gemma 3 also exists with images."""
    if fields.text("model_type") != "gemma3":
        return fields
    nested = fields.fields("text_config").values
    shared = ("quantization_config", "eos_token_id")
    outer = {name: fields.values[name] for name in shared if name in fields}
    return Fields({**outer, **nested, "model_type": "gemma3_text"}, fields.source)


def transformer_config(fields: Fields) -> TransformerConfig:
    """Converts config.json; missing fields have the defaults of transformers.

    The maximum length is the longest for which both models are equal: with rotary
    frequencies that change with the length of the text (`dynamic`) the length from
    which they change.
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
    family = _FAMILIES[kind]
    given = {
        name: value
        for name, value in fields.values.items()
        if value is not None or name in _OFF
    }
    fields = Fields({**family.defaults, **given}, fields.source)
    width = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    if heads < 1:
        raise UserError(f"num_attention_heads in {fields.source} must be above 0.")
    head = fields.integer("head_dim", width // heads)
    rotary, max_length = rotary_config(fields)
    if rotary.fraction != 1 and not family.partial_rotary:
        # transformers ignores it for these types, other programs do not.
        raise UserError(
            f"{fields.source} sets partial_rotary_factor, which models of type "
            f"{kind!r} do not have in transformers: remove it if the model was trained "
            "there."
        )
    # One switch is for all four projections.
    bias, mlp_bias = (
        name in family.biases and fields.flag(name, False)
        for name in (_ATTENTION, _MLP)
    )
    options: Options = {
        "vocab_size": fields.integer("vocab_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "d_model": width,
        "d_ff": fields.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": None if head * heads == width else head,
        "max_length": max_length,
        "activation": activation_of(fields, fields.text("hidden_act", "silu")),
        "gated": True,
        "use_bias": False,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": mlp_bias,
        "norm": "rms",
        "norm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "rotary": rotary,
        "tied_softmax": fields.flag("tie_word_embeddings", False),
    }
    options |= {**family.fixed, **family.options(fields)}
    if options.get("window", 0) >= max_length and "window_rotary" not in options:
        # No text is longer than the window.
        del options["window"], options["windowed_layers"]
    return TransformerConfig(**options)


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
