import json

import pytest

from bpd_jax.base import errors
from bpd_jax.base.errors import UserError
from bpd_jax.formats.generation_settings import generation_settings, name_sampling
from bpd_jax.formats.json_files import Fields


@pytest.fixture(autouse=True)
def _new_warnings():
    errors.warn.cache_clear()


def read(**values):
    return generation_settings(Fields(values, "generation_config.json"), 20)


def test_settings_with_options_are_read(capsys):
    assert read(eos_token_id=[1, 2], max_length=20, repetition_penalty=1.0) == {}
    numbers = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "min_length": 4}
    numbers["min_new_tokens"] = 2
    tokens = {"suppress_tokens": (1, 19), "begin_suppress_tokens": (3,)}
    words = {"bad_words_ids": ((1,), (2, 3))}
    lists = json.loads(json.dumps({**tokens, **words}))
    assert read(**numbers, **lists) == {**numbers, **tokens, **words}
    assert capsys.readouterr().err == ""


def test_settings_without_an_option_are_named_once_even_if_unknown(capsys):
    neutral = {"max_length": 20, "length_penalty": 1.0, "num_beams": 1}
    silent = {"use_cache": True, "pad_token_id": 3, "transformers_version": "5.24.0"}
    read(**neutral, **silent, do_sample=False, temperature=0.7, stop_strings=None)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        read(max_new_tokens=9, max_length=40, max_time=2.5, new=[3])
        read(num_beams=4, do_sample=True, temperature=0.7)
    said = capsys.readouterr().err
    named = "max_new_tokens = 9, max_length = 40, max_time = 2.5, new = [3]."
    for text in (f"no effect here: {named}", "num_beams = 4", "temperature = 0.7"):
        assert said.count(text) == 1
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
