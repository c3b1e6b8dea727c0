"""The gain of refinement that the benchmark of refiners reports."""

import types

import numpy as np
import pytest

from benchmarks.refiner_gains import names_of_files, refinement, share_of_tokens
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.method_text import parse_method

FIRST, REFINED, OTHER, BOTH = map(
    parse_method,
    [
        *("zero_gram:16", "block+ngram/best:16", "block/best:16"),
        "block+markov+ngram/best:16",
    ],
)


def text(calls, tokens=12):
    """A text of the tokens 0, 1, …."""
    return types.SimpleNamespace(output_ids=np.arange(tokens), serial_calls=calls)


def test_gain_is_over_the_same_source_and_search():
    replayed = {
        FIRST: [text(12), text(12)],
        OTHER: [text(8), text(12)],
        REFINED: [text(4), text(6)],
    }
    [measured] = refinement(REFINED, replayed)["refinement"]
    assert measured["over"] == "block/best:16"
    assert measured["gain"] == pytest.approx(20 / 10 - 1)
    # The gain is the same on both texts. Not paired, it would be 8 / 6 … 12 / 4.
    assert measured["paired_interval"] == pytest.approx([1, 1])


def test_alias_is_compared_with_its_composition():
    replayed = {FIRST: [text(12)], parse_method("ngram:16"): [text(6)]}
    [measured] = refinement(parse_method("ngram:16"), replayed)["refinement"]
    assert measured["over"] == "zero_gram:16"
    assert measured["gain"] == pytest.approx(1)


def test_each_of_several_refiners_is_left_out():
    replayed = {OTHER: [text(12)], REFINED: [text(8)], BOTH: [text(6)]}
    gains = refinement(BOTH, replayed)["refinement"]
    assert {gain["over"]: gain["gain"] for gain in gains} == pytest.approx(
        {"block/best:16": 1, "block+ngram/best:16": 1 / 3}
    )


@pytest.mark.parametrize("method", [REFINED, OTHER])
def test_without_the_other_method_there_is_no_gain(method):
    assert not refinement(method, {FIRST: [text(12)], method: [text(6)]})


def test_share_of_tokens_in_a_draft_vocabulary():
    texts = [text(1), text(1, tokens=2)]
    assert share_of_tokens(np.array([3, 1, 20]), texts) == 3 / 14


def test_files_of_the_same_name_are_refused():
    assert names_of_files(["a/math.jsonl", "a/qa.txt"]) == ["math", "qa"]
    with pytest.raises(UserError, match="two files of prompts are called qa"):
        names_of_files(["a/qa.txt", "a/math.jsonl", "b/qa.txt"])
