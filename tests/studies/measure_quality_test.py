"""From decoded tokens to records."""

from typing import NamedTuple

import pytest

from bpd_jax.studies import measure_quality
from bpd_jax.studies.measure_quality import (
    passage_records,
    plain_text,
    quality_records,
)
from bpd_jax.studies.study_records import QualityRecord


class ExampleStub(NamedTuple):
    index: int
    part: str
    references: tuple[str, ...]


def decode(ids):
    return "".join("<> abcd"[token] for token in ids)


def test_plain_text_ends_at_the_first_end_token():
    assert plain_text([2, 3, 2, 4, 1, 5], decode, (0, 1)) == "a b"
    assert plain_text([3, 4], decode, (0, 1)) == "ab"


def test_texts_are_scored_by_the_metric_of_their_task():
    """`b c` against `b` and `d`: precision 1/2 and recall 1 for `b`."""
    examples = [
        ExampleStub(3, "report", ("b", "d")),
        ExampleStub(4, "tune", ("d",)),
        ExampleStub(5, "report", ()),
    ]
    outputs = [[4, 2, 5, 0], [2, 6, 0], [4]]
    records = quality_records("squad", examples, outputs, decode, (0,))
    assert records == [
        QualityRecord(
            "squad",
            3,
            "report",
            "b c",
            ["b", "d"],
            {"exact_match": 0.0, "f1": pytest.approx(2 / 3)},
        ),
        QualityRecord("squad", 4, "tune", "d", ["d"], {"exact_match": 1.0, "f1": 1.0}),
    ]
    assert quality_records("qa", examples, outputs, decode, (0,)) == []


def test_last_words_are_the_references_of_passages(monkeypatch):
    scores = [{"log_prob": -1.0}, {"log_prob": -2.0}]
    monkeypatch.setattr(measure_quality, "passage_scores", lambda *a, **k: scores)
    examples = [ExampleStub(0, "report", ()), ExampleStub(1, "tune", ())]
    records = passage_records("lambada", examples, ["a b", "c d e"], None, None, decode)
    assert [(x.example, x.part, x.references, x.scores) for x in records] == [
        (0, "report", ["b"], scores[0]),
        (1, "tune", ["e"], scores[1]),
    ]
