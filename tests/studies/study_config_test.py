"""Settings of studies: when texts are shared, and validation."""

import json

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.studies.study_config import StudyConfig


def config(**changes):
    fields = {"study": "table4", "model": "demo", "tasks": ["held_out"]}
    return StudyConfig(**{**fields, **changes})


def test_same_settings_give_the_same_texts():
    """Other contenders, tasks or labels change no text; lengths do."""
    base = config(contenders=["ngram:1"])
    same_lengths = config(contenders=["bpd"], tasks=["squad"], shown=3)
    assert base.same_texts(json.loads(json.dumps({"settings": same_lengths.settings})))
    assert not base.same_texts({"settings": config(max_new_tokens=99).settings})
    assert not base.same_texts({})
    # Records of earlier versions have no lengths by task.
    earlier = {k: v for k, v in same_lengths.settings.items() if k != "decode_lengths"}
    assert base.same_texts({"settings": earlier})
    longer = config(decode_lengths={"held_out": 9})
    assert longer.new_tokens("held_out") == 9
    assert longer.new_tokens("squad") == base.max_new_tokens
    assert not longer.same_texts({"settings": earlier})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tasks": []}, "tasks is empty"),
        ({"contenders": ["bpd", "bpd"]}, "without repetition"),
        ({"contenders": ["ngram:1@own"]}, "requires the set 'own'"),
        ({"contenders": ["nothing"]}, "unknown method"),
        ({"assets": {"own": {"ngrams": "a"}}}, "unknown kind 'ngrams'"),
        ({"speculative": ["bpd"]}, "speculative names 'bpd'"),
        ({"batched": ["bpd"]}, "batched names 'bpd'"),
        ({"tuners": {"ngram": "neural:1"}}, "to a contender of that class"),
        ({"tuners": {"trees": "medusa:4"}}, "the classes ngram, neural"),
        ({"tuners": {"ngram": "ngram:1:alpha=2"}}, "class without alpha"),
        ({"tuners": {"ngram": "ngram:1@own"}}, "requires the set 'own'"),
        ({"tuners": {"ngram": "ngram:1"}, "alphas": [-1.0]}, "alphas must be a list"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        config(**changes)
