"""The settings of generation that come with a model, as options of decoding.

transformers applies those of generation_config.json by itself, and so does bpd_jax as
far as it has the same options. The others are named once.
"""

from collections.abc import Mapping
from typing import Any

from bpd_jax.base.errors import UserError, warn
from bpd_jax.pretrained.json_files import Fields

# Settings that choose tokens, with the value that has no effect.
_NEUTRAL: dict[str, Any] = {
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "stop_strings": None,
    "watermarking_config": None,
    "dola_layers": None,
    "prompt_lookup_num_tokens": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
# Those that only sampling has.
_SAMPLING: dict[str, Any] = {
    "temperature": 1,
    "top_k": 50,
    "top_p": 1,
    "min_p": 0,
    "top_h": None,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
}
_LISTS = ("suppress_tokens", "begin_suppress_tokens")


def generation_settings(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """The options of decoding that generation_config.json sets."""
    settings: dict[str, Any] = {}
    if (penalty := fields.number("repetition_penalty", 1)) != 1:
        if penalty <= 0:
            raise UserError(f"repetition_penalty in {fields.source} must be above 0.")
        settings["repetition_penalty"] = penalty
    for name in ("no_repeat_ngram_size", "min_length", "min_new_tokens"):
        if (value := fields.integer(name, 0)) != 0:
            if value < 0:
                raise UserError(f"{name} in {fields.source} must not be below 0.")
            settings[name] = value
    for name in _LISTS:
        if tokens := fields.items(name):
            settings[name] = _tokens(fields, name, tokens, vocab_size)
    if words := fields.items("bad_words_ids"):
        settings["bad_words_ids"] = tuple(
            _tokens(fields, "bad_words_ids", word, vocab_size) for word in words
        )
    _name_others(
        fields.source,
        {k: v for k, v in fields.values.items() if _has_effect(k, v, _NEUTRAL)},
    )
    if fields.values.get("do_sample") is True:
        sampling = {
            k: v for k, v in fields.values.items() if _has_effect(k, v, _SAMPLING)
        }
        warn(
            f"{fields.source} asks for sampling"
            + (f" ({_listed(sampling)})" if sampling else "")
            + ": texts are decoded greedily unless a temperature is given."
        )
    return settings


def name_sampling(source: str, values: Mapping[str, Any]) -> None:
    """Names settings of `general.sampling` in a GGUF file, which are not applied."""
    if values:
        warn(
            f"{source} recommends settings of sampling that are not applied "
            f"({_listed(values)}): give them as options."
        )


def _name_others(source: str, values: Mapping[str, Any]) -> None:
    if values:
        warn(
            f"{source} has settings that are not supported and have no effect: "
            f"{_listed(values)}."
        )


def _has_effect(name: str, value: Any, neutral: Mapping[str, Any]) -> bool:
    return name in neutral and value is not None and value != neutral[name]


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {str(value)[:80]}" for name, value in values.items())


def _tokens(fields: Fields, name: str, tokens: Any, vocab_size: int) -> tuple[int, ...]:
    if (
        not isinstance(tokens, list)
        or not tokens
        or any(type(t) is not int or not 0 <= t < vocab_size for t in tokens)
    ):
        raise UserError(
            f"{name} in {fields.source} must consist of token ids below {vocab_size}."
        )
    return tuple(tokens)
