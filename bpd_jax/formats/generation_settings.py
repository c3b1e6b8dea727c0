"""The settings of generation that come with a model, as options of decoding.

transformers applies those of generation_config.json by itself, and so does bpd_jax as
far as it has the same options. The others are named once, also those that this file
does not know. Lengths are not taken over: a text has at most `max_new_tokens` tokens,
which is always the caller's choice.
"""

import re
from collections.abc import Mapping
from typing import Any

from bpd_jax.base.errors import UserError, warn
from bpd_jax.formats.json_files import Fields

# The value without effect of settings whose value is not null, false, 0 or empty.
_NEUTRAL: dict[str, Any] = {
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "length_penalty": 1,
    "max_length": 20,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "temperature": 1,
    "top_k": 50,
    "top_p": 1,
    "typical_p": 1,
}
# Those that only sampling has.
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff"),
)
_NUMBERS = ("no_repeat_ngram_size", "min_length", "min_new_tokens")
_LISTS = ("suppress_tokens", "begin_suppress_tokens")
_APPLIED = ("repetition_penalty", "bad_words_ids", "do_sample", *_NUMBERS, *_LISTS)
# Names of those that change no text: tokens that are read elsewhere, memory, speed,
# and what is returned with the text.
_WITHOUT_TEXT = re.compile(
    r"_from_model_config|transformers_version|trust_remote_code|(bos|eos|pad)_token_id"
    r"|decoder_start_token_id|.*cache.*|.*compile.*|output_.*|return_.*"
    r"|.*assistant.*|.*lookbehind|max_matching_ngram_size|speculation_type|use_mtp"
    r"|low_memory|prefill_chunk_size|continuous_batching_config"
)


def generation_settings(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """The options of decoding that generation_config.json sets."""
    settings: dict[str, Any] = {}
    if (penalty := fields.number("repetition_penalty", 1)) != 1:
        if penalty <= 0:
            raise UserError(f"repetition_penalty in {fields.source} must be above 0.")
        settings["repetition_penalty"] = penalty
    for name in _NUMBERS:
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
    effective = {k: v for k, v in fields.values.items() if _has_effect(k, v)}
    if others := {k: v for k, v in effective.items() if k not in _SAMPLING}:
        warn(
            f"{fields.source} has settings that have no effect here: {_listed(others)}."
        )
    if fields.flag("do_sample", False):
        sampling = {k: v for k, v in effective.items() if k in _SAMPLING}
        about = f" ({_listed(sampling)})" if sampling else ""
        warn(
            f"{fields.source} asks for sampling{about}: texts are decoded greedily "
            "unless a temperature is given."
        )
    return settings


def name_sampling(source: str, values: Mapping[str, Any]) -> None:
    """Names settings of `general.sampling` in a GGUF file, which are not applied."""
    if values:
        warn(
            f"{source} recommends settings of sampling that are not applied "
            f"({_listed(values)}): give them as options."
        )


def _has_effect(name: str, value: Any) -> bool:
    if value is None or name in _APPLIED or _WITHOUT_TEXT.fullmatch(name):
        return False
    return value != _NEUTRAL[name] if name in _NEUTRAL else bool(value)


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
