"""Table 5 from explicit records."""

import pytest

from experiments import printed
from tests.experiments.builders import draft, exhibit_of, values_of


def drafts(task, contender, accepted, equal, example=0, part="report"):
    return draft(contender, task, accepted, equal=equal, example=example, part=part)


def build_exhibit(records, tasks=("squad", "qa")):
    return exhibit_of("table5", records, tasks)


def test_wins_and_losses_of_two_tasks():
    """SQuAD: a win that repairs, a win that introduces, a tie, a loss; then a win.

    QA: one loss that repairs, and two ties. The tuning example does not count.
    """
    records = [
        drafts("squad", "bpd", "1121", "2010"),
        drafts("squad", "neural:1", "3211", "0110"),
        drafts("squad", "bpd", "1", "0", example=1),
        drafts("squad", "neural:1", "2", "0", example=1),
        drafts("qa", "bpd", "211", "200"),
        drafts("qa", "neural:1", "111", "000"),
        drafts("qa", "bpd", "1", "1", 7, "tune"),
        drafts("qa", "neural:1", "2", "0", 7, "tune"),
    ]
    exhibit = build_exhibit(records)
    [table] = exhibit.tables
    rows = values_of(table)
    # One win in each half of SQuAD: margins 2 - 1 and 1, so p = 2 / 4 before Holm's 3.
    assert rows["SQUAD"] == pytest.approx([1, 0, 3, 100 / 3, 100 / 3, 1, 0, 0, 1])
    assert rows["QA"] == [2, 0, 0, None, None, 1, 100, 0, 1]
    assert rows["All"][:3] == [3, 0, 3]
    assert rows["All"][5:8] == [2, 50, 0]
    assert table.rows[0].cells[3].paper == printed.TABLE5["squad"]["wins_repair"]
    [chart] = exhibit.charts
    assert chart.categories == ["SQUAD", "QA"]
    assert chart.series[0].y == [60, 0]
    assert chart.series[1].y == [20, pytest.approx(100 / 3)]
    repairs, base_rate, introduces, weak = exhibit.findings
    # A third of the wins repairs, and half of the losses; a third introduces. Three
    # texts cannot tell.
    assert (repairs.holds, introduces.holds, weak.holds) == (None, None, None)
    assert "33.3 % of wins repair, 0.0 % of ties" in base_rate.evidence
    assert repairs.evidence.startswith(
        "neural:1: 33.3 % of wins repair, 50.0 % of losses, −16.7 percentage "
        "points (3 texts: too few), more on 1 of 1 task. "
    )
    assert "holds on 6 of 7 tasks" in repairs.evidence


def test_local_neural_rescoring_decides():
    """The paper's table is about it: 100 % of its wins repair, of the n-gram's 0 %."""
    records = [
        drafts("qa", contender, accepted, equal, example)
        for contender, accepted, equal in (
            ("bpd", "1122", "1111"),
            ("neural:1", "2211", "0011"),
            ("ngram:1", "2211", "1100"),
        )
        for example in range(8)
    ]
    repairs, *_ = build_exhibit(records, ("qa",)).findings
    assert repairs.holds is True
    assert "ngram:1: 0.0 % of wins repair, 100.0 % of losses" in repairs.evidence
