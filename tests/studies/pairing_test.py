"""Which examples several contenders share."""

import pathlib

from bpd_jax.studies.records import DraftRecord
from bpd_jax.studies.results import contenders_of, oracle_of, paired
from bpd_jax.studies.run_files import StudyRun


def run_of(*places):
    """Records of (contender, task, example) and perhaps part."""
    records = [
        DraftRecord(task, example, *(part or ["report"]), name, "1", "1", "0", "1", 1)
        for name, task, example, *part in places
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
    assert contenders_of(run) == ["bpd", "ngram:1"]
    found = paired(run, ["bpd", "ngram:1"])
    expected = [("a", 1), ("b", 0)]
    assert [[(r.task, r.example) for r in one] for one in found] == [expected] * 2
    assert paired(run, ["bpd", "ngram:1"], "a", "tune") == [[], []]


def test_the_oracle_is_the_widest_of_all_heads():
    run = run_of(
        ("oracle:k=2", "a", 1), ("oracle:k=16", "a", 1), ("oracle:heads=3", "a", 1)
    )
    assert oracle_of(run) == "oracle:k=16"
    assert oracle_of(run_of(("oracle", "a", 1), ("oracle:k=4", "a", 1))) == "oracle"
    assert oracle_of(run_of(("bpd", "a", 1))) is None
