"""Records are written to JSON and read, and invalid data are refused."""

import dataclasses
import json

import pytest

from bpd_jax.errors import UserError
from bpd_jax.reporting.evaluation_report import methods_exhibit
from bpd_jax.reporting.records import (
    Candidate,
    EvaluationReport,
    LatticePicture,
    MethodSummary,
    Path,
    Step,
    save_report,
)


def test_report_round_trips_through_json(report):
    data = json.loads(json.dumps(report.to_json()))
    assert EvaluationReport.from_json(data) == report


def test_unusual_text_round_trips_through_a_file(report, tmp_path):
    unusual = dataclasses.replace(report, notes=["\udc80 \x00 ⏎ 漢 </script>"])
    save_report(unusual, tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert EvaluationReport.from_json(data) == unusual


def test_reports_without_statistics_of_drafts_are_read(report, tmp_path):
    data = report.to_json()
    new_fields = ("gain_interval", "divergence", "nodes", "repeated", "longest_run")
    for method in data["methods"]:
        for field in (*new_fields, "entropies", "accepted"):
            del method[field]
    old = EvaluationReport.from_json(data)
    assert all(method.nodes is None for method in old.methods)
    assert [t.name for t in methods_exhibit(old).tables] == ["methods"]
    assert [t.name for t in methods_exhibit(report).tables] == ["methods", "drafts"]


def test_optional_fields_may_be_missing():
    data = {"title": "t", "created": "c", "task": "k", "device": "d", "methods": []}
    assert EvaluationReport.from_json(data) == EvaluationReport("t", "c", "k", "d", [])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"title": 3}, "EvaluationReport.title should be str, not 3"),
        ({"colour": "red"}, "EvaluationReport has unknown fields: colour"),
        ({"methods": [{"name": "bpd"}]}, r"EvaluationReport.methods\[0\] is not valid"),
        (
            {"lattice": {"prompt_tail": "", "positions": [3]}},
            r"EvaluationReport.lattice.positions\[0\] should be list, not 3",
        ),
    ],
)
def test_errors_name_the_invalid_field(report, change, message):
    with pytest.raises(UserError, match=message):
        EvaluationReport.from_json(report.to_json() | change)


def test_wrong_nested_types_are_refused(report):
    data = report.to_json()
    data["methods"][1]["interval"] = [1.0, 2.0, 3.0]
    with pytest.raises(UserError, match="interval should have 2 entries"):
        EvaluationReport.from_json(data)
    data["methods"][1] = data["methods"][0] | {"name": "x", "tokens": True}
    with pytest.raises(UserError, match="tokens should be int, not True"):
        EvaluationReport.from_json(data)


@pytest.mark.parametrize("accepted", [0, 3])
def test_a_step_accepts_at_least_its_certain_token(accepted):
    with pytest.raises(ValueError, match=f"accepted is {accepted}"):
        Step(["a", "b"], accepted)


def test_paths_stay_inside_the_lattice():
    positions = [[Candidate("a", 0.0)], [Candidate("b", -0.1), Candidate("c", -2.4)]]
    LatticePicture("", positions, [Path("BPD", [0, 1], 1)], ["a", "b"])
    for indices in ([0, 2], [1, 0], [0, 0, 0], [0, -1]):
        with pytest.raises(ValueError, match="leaves the lattice"):
            LatticePicture("", positions, [Path("BPD", indices, 1)], ["a", "b"])


def test_records_name_known_methods(report):
    with pytest.raises(ValueError, match="unknown method 'greedy'"):
        dataclasses.replace(report, methods=report.methods[1:])
    with pytest.raises(ValueError, match="same name"):
        dataclasses.replace(report, methods=report.methods + report.methods[:1])


def test_near_ties_are_among_the_differences():
    summary = MethodSummary("bpd", "BPD", 1.5, 10, 15, 0.1, differing=2, near_ties=2)
    assert not summary.identical
    with pytest.raises(ValueError, match="only 1 outputs"):
        dataclasses.replace(summary, differing=1)
