"""Tests of bpd_jax.pretrained.generation_settings."""

import pytest

from bpd_jax.base import errors
from bpd_jax.base.errors import UserError
from bpd_jax.pretrained.generation_settings import generation_settings, name_sampling
from bpd_jax.pretrained.json_files import Fields


@pytest.fixture(autouse=True)
def _new_warnings():
    errors.warn.cache_clear()


def read(**values):
    return generation_settings(Fields(values, "generation_config.json"), 20)


def test_settings_with_options_are_read(capsys):
    assert read(eos_token_id=[1, 2], max_length=20, repetition_penalty=1.0) == {}
    assert read(
        repetition_penalty=1.1,
        no_repeat_ngram_size=3,
        min_length=4,
        min_new_tokens=2,
        suppress_tokens=[1, 19],
        begin_suppress_tokens=[3],
        bad_words_ids=[[1], [2, 3]],
    ) == {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "min_length": 4,
        "min_new_tokens": 2,
        "suppress_tokens": (1, 19),
        "begin_suppress_tokens": (3,),
        "bad_words_ids": ((1,), (2, 3)),
    }
    assert capsys.readouterr().err == ""


def test_settings_without_an_option_are_named_even_if_unknown(capsys):
    neutral = {"max_length": 20, "length_penalty": 1.0, "early_stopping": False}
    silent = {"use_cache": True, "pad_token_id": 3, "num_assistant_tokens": 20}
    read(**neutral, **silent, transformers_version="5.24.0", stop_strings=None)
    assert capsys.readouterr().err == ""
    read(max_new_tokens=9, max_length=40, max_time=2.5, force_words_ids=[[1]], new=[3])
    said = capsys.readouterr().err
    assert (
        "have no effect here: max_new_tokens = 9, max_length = 40, max_time = 2.5, "
        "force_words_ids = [[1]], new = [3]."
    ) in said


def test_other_settings_are_named_once(capsys):
    for _ in range(2):
        read(num_beams=4, forced_eos_token_id=3, do_sample=True, temperature=0.7)
    said = capsys.readouterr().err
    for text in ("num_beams = 4", "forced_eos_token_id = 3", "temperature = 0.7"):
        assert said.count(text) == 1
    read(num_beams=1, do_sample=False, temperature=0.7, renormalize_logits=False)
    assert capsys.readouterr().err == ""
    name_sampling("m.gguf", {"temp": 0.6, "penalty_repeat": 1.1})
    assert "penalty_repeat = 1.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 0},
        {"min_length": -1},
        {"suppress_tokens": [20]},
        {"bad_words_ids": [1]},
        {"do_sample": "true"},
    ],
)
def test_invalid_values_are_refused(values):
    with pytest.raises(UserError, match=f"{next(iter(values))} in generation_config"):
        read(**values)
