"""Examples that several contenders share."""

import pathlib

from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_records import DraftRecord


def run_of(*keys):
    """Records of (contender, task, example) and perhaps part."""
    records = [
        DraftRecord(task, example, *(part or ["report"]), name, "1", "1", "0", "1", 1)
        for name, task, example, *part in keys
    ]
    return StudyRun(pathlib.Path(), "table4", {"tasks": {"a": "A", "b": "B"}}, records)


def test_only_shared_examples_are_compared():
    run = run_of(
        ("bpd", "b", 0),
        ("bpd", "a", 2),
        ("bpd", "a", 1),
        ("ngram:1", "a", 1),
        ("ngram:1", "a", 2, "tune"),
        ("ngram:1", "b", 0),
        ("ngram:1", "b", 1),
    )
    assert run.contenders == ["bpd", "ngram:1"]
    paired = run.paired(["bpd", "ngram:1"])
    expected = [("a", 1), ("b", 0)]
    assert [[(r.task, r.example) for r in records] for records in paired] == [
        expected
    ] * 2
    assert [*map(len, run.paired(["bpd", "ngram:1"], "a", "tune"))] == [0, 0]


def test_the_oracle_is_the_widest_of_all_heads():
    run = run_of(
        ("oracle:k=2", "a", 1), ("oracle:k=16", "a", 1), ("oracle:heads=3", "a", 1)
    )
    assert run.oracle == "oracle:k=16"
    assert run_of(("oracle", "a", 1), ("oracle:k=4", "a", 1)).oracle == "oracle"
    assert run_of(("bpd", "a", 1)).oracle is None
