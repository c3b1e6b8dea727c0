"""Reads the config.json of a published block drafter; see `drafter_layout`."""

import dataclasses
from typing import Any, NoReturn

from bpd_jax.base.errors import UserError, naming
from bpd_jax.formats.drafter_layout import CONFIDENCE, TYPE
from bpd_jax.formats.hf_config import activation_of
from bpd_jax.formats.hf_rotary import FULL, WINDOWED, rope_parameters, rotary_config
from bpd_jax.formats.json_files import Fields
from bpd_jax.models.drafter_config import BlockDrafterConfig

DFLASH = ("DFlashDraftModel",)
DFLASH2 = ("DFlash2DraftModel",)
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")
# Types of layers that published drafters name.
_LAYERS = ("llama", "mistral", "qwen2", "qwen3")
# Settings of which only the usual value is supported.
_USUAL = {
    "quantization_config": None,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "mlp_bias": False,
    "is_neox_style": True,
    "use_aux_hidden_state": True,
    "input_embedding_scale": 1,
    "output_multiplier": 1,
    "logit_scale": 1,
    "final_logit_softcapping": 0,
}


@dataclasses.dataclass(frozen=True)
class Description:
    """The contents of config.json.

    Attributes:
      config: configuration of the drafter.
      mask_token: token whose embedding is the mask embedding.
      d_model: D of the target.
      vocab_size: V of the target.
      normalised_last: whether the state of the target's last layer is that after the
        final norm, as in the `hidden_states` of the library transformers.
    """

    config: BlockDrafterConfig
    mask_token: int
    d_model: int
    vocab_size: int
    normalised_last: bool


def describe(fields: Fields, names: set[str]) -> Description:
    """Reads a config.json in any of the layouts."""
    with naming(fields.source):
        return (_speculators if TYPE in fields else _qwen3)(fields, names)


def _speculators(fields: Fields, names: set[str]) -> Description:
    """The layout of speculators; absent fields have the defaults of the library."""
    kind = fields.text(TYPE)
    if kind not in ("dflash", "dspark"):
        raise UserError(
            f"{fields.source} describes a drafter of type {kind!r}, which cannot be "
            "read as a block drafter: choose one of type dflash or dspark, or pass one "
            "of type eagle3 as --eagle."
        )
    dspark = kind == "dspark"
    layers = fields.fields("transformer_layer_config")
    anchor = fields.flag("sample_from_anchor", dspark)
    draft = fields.integer("draft_vocab_size", 32000)
    config = BlockDrafterConfig(
        feature_layers=_layers(fields, "aux_hidden_state_layer_ids", 1),
        block_size=fields.integer("block_size", 8) + anchor,
        guess_at_anchor=anchor,
        window=_window(fields, layers),
        draft_vocabulary=None if draft == layers.integer("vocab_size") else draft,
        **layer_sizes(fields, layers),
        **_heads(fields, names, dspark, rank=256 if dspark else 0),
    )
    return _description(fields, layers, config, normalised_last=False)


def _qwen3(fields: Fields, names: set[str]) -> Description:
    """The layouts of z-lab and DeepSpec."""
    architectures = [str(name) for name in fields.items("architectures")]
    dspark = any(name in DSPARK for name in architectures)
    dflash2 = any(name in DFLASH2 for name in architectures)
    if not dspark and not dflash2 and not any(name in DFLASH for name in architectures):
        raise UserError(
            f"{fields.source} does not describe a supported block drafter: its "
            f"architectures are {', '.join(architectures) or 'missing'}, not "
            f"{', '.join(DFLASH + DFLASH2 + DSPARK)}."
        )
    inner = fields.fields("dflash_config")
    # Newer files have in `dflash_config` what older ones have at the top level.
    both = Fields({**fields.values, **inner.values}, fields.source)
    for name in ("use_swa", "causal", "is_causal"):
        if both.flag(name, False):
            unsupported(fields, f"another kind of attention ({name})")
    anchor = both.flag(
        "sample_from_anchor", not both.flag("dspark_bonus_anchor", not dspark)
    )
    vocabulary = fields.integer("vocab_size")
    draft = fields.integer("draft_vocab_size", vocabulary)
    if dflash2:
        if draft != vocabulary:
            unsupported(both, "a selector with a draft vocabulary (draft_vocab_size)")
        heads: dict[str, Any] = {
            "convolution_taps": both.integer("conv_kernel_size"),
            "convolution_group": both.integer("conv_group_size"),
            "markov_rank": both.integer("selector_rank"),
            "markov_reads_state": True,
        }
    else:
        heads = _heads(both, names, dspark, rank=0)
    config = BlockDrafterConfig(
        feature_layers=_layers(both, "target_layer_ids", 0),
        block_size=both.integer("block_size") + anchor,
        guess_at_anchor=anchor,
        draft_vocabulary=None if draft == vocabulary else draft,
        **_moving_window(both, fields),
        **layer_sizes(both, fields),
        **heads,
    )
    return _description(both, fields, config, normalised_last=True)


def _description(
    fields: Fields,
    layers: Fields,
    config: BlockDrafterConfig,
    normalised_last: bool,
) -> Description:
    width, vocabulary = layers.integer("hidden_size"), layers.integer("vocab_size")
    if fields.integer("target_hidden_size", width) != width:
        unsupported(fields, f"a width ({width}) that is not that of the model")
    token = fields.integer("mask_token_id")
    if not 0 <= token < vocabulary:
        unsupported(fields, f"a mask token ({token}) outside of its vocabulary")
    return Description(config, token, width, vocabulary, normalised_last)


def _layers(fields: Fields, name: str, first: int) -> tuple[int, ...]:
    """Layers of the target, converted from counting from `first` to counting from 0."""
    numbers = fields.items(name)
    if not numbers or not all(type(number) is int for number in numbers):
        raise UserError(f"{fields.source} has no list of layers {name}.")
    if min(numbers) < first:
        feature = f"the embedding or no layer of the model ({name} {numbers})"
        unsupported(fields, feature)
    return tuple(number - first for number in numbers)


def layer_sizes(fields: Fields, layers: Fields) -> dict[str, Any]:
    """Sizes of the layers, which are those of Qwen3 in all layouts."""
    kind = layers.text("model_type", "qwen3")
    if kind not in _LAYERS:
        unsupported(fields, f"layers of type {kind!r}")
    for name, usual in _USUAL.items():
        for part in (fields, layers):
            if part.values.get(name) not in (None, usual):
                unsupported(fields, f"{name} = {part.values[name]!r}")
    # If kinds of layers have different positions: those of the kind that all are of.
    which = WINDOWED if _slides(fields, layers) else FULL
    rotary, _ = rotary_config(layers, which)
    scaling = rope_parameters(layers, which).values
    if "dynamic" in (scaling.get("rope_type"), scaling.get("type")):
        unsupported(fields, "rotary positions that depend on the length of the text")
    if rotary.fraction != 1:
        unsupported(fields, "rotary positions for a part of each head")
    heads = layers.integer("num_attention_heads")
    width = layers.integer("hidden_size")
    head = 128 if kind == "qwen3" else width // max(heads, 1)
    return {
        "num_layers": layers.integer("num_hidden_layers"),
        "d_ff": layers.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": layers.integer("num_key_value_heads", heads),
        "head_dim": layers.integer("head_dim", head),
        "norm_epsilon": layers.number("rms_norm_eps", 1e-6),
        "rotary": rotary,
        "activation": activation_of(layers, layers.text("hidden_act", "silu")),
        "query_key_norm": True,
        "qkv_bias": layers.flag("attention_bias", False),
    }


def _window(fields: Fields, layers: Fields) -> int | None:
    """Accepted tokens that every layer attends to, in speculators; None for all."""
    if not _slides(fields, layers):
        return None
    if not fields.flag("sliding_window_non_causal", False):
        unsupported(fields, "causal blocks (sliding_window_non_causal = false)")
    return layers.integer("sliding_window")


def _moving_window(fields: Fields, layers: Fields) -> dict[str, Any]:
    """The sliding window of all layers in the layouts of z-lab."""
    if not _slides(fields, layers):
        return {}
    if "is_causal" not in fields and "causal" not in fields:
        unsupported(fields, "a sliding window of causal blocks (without is_causal)")
    if not fields.flag("use_sliding_window", False):
        return {}  # transformers ignores `sliding_window`.
    window = fields.integer("swa_window_size", layers.integer("sliding_window", 0))
    return {"window": window, "moving_window": True}


def _slides(fields: Fields, layers: Fields) -> bool:
    kinds = {kind == WINDOWED for kind in layers.items("layer_types")}
    if len(kinds) > 1:
        unsupported(fields, "a sliding window in some of its layers only")
    return True in kinds


def _heads(
    fields: Fields, names: set[str], dspark: bool, *, rank: int
) -> dict[str, Any]:
    """Settings of the Markov head and the confidence head, which only DSpark has."""
    rank = fields.integer("markov_rank", rank)
    kind = fields.text("markov_head_type", "vanilla").lower()
    if rank and kind != "vanilla":
        feature = f"a Markov head of type {kind!r} (only vanilla is supported)"
        unsupported(fields, feature)
    # vLLM accepts a confidence head that is configured but missing.
    confidence = fields.flag("enable_confidence_head", dspark) and CONFIDENCE in names
    reads = fields.flag("confidence_head_with_markov", dspark and rank > 0)
    return {
        "markov_rank": rank,
        "confidence": confidence,
        "confidence_reads_markov": confidence and reads,
    }


def unsupported(fields: Fields, feature: str) -> NoReturn:
    """Refuses a drafter with a feature that is not supported."""
    raise UserError(
        f"{fields.source} requires {feature}, which bpd_jax does not support for "
        "drafters: use another one."
    )
