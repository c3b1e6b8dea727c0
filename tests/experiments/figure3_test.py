"""Figure 3 from explicit records."""

import pytest

from experiments.figure3.study import mean_entropy
from tests.experiments.builders import draft, exhibit_of, values_of


def drafts(task, accepted, entropy=(), contender="bpd", example=0):
    return draft(contender, task, accepted, entropy=entropy, example=example)


def test_texts_are_weighted_by_their_tokens():
    """One token with 1 and 2 nats, three with 5 and 4: (1 + 15) / 4, (2 + 12) / 4."""
    records = [drafts("a", "1", (1.0, 2.0)), drafts("a", "111", (5.0, 4.0))]
    assert mean_entropy(records) == [4.0, 3.5]
    assert mean_entropy([drafts("a", "1")]) == []


@pytest.fixture
def full_exhibit():
    """h_max is 3, 2 and 1 with three heads, and tokens per call are 3, 2 and 1.

    With two heads h_max is 2, 2 and 1, and tokens per call 2, 1 and 1.
    """
    records = [
        drafts("lambada", "333", (1.0, 2.0, 3.0)),
        drafts("squad", "222222", (1.0, 2.0, 1.5)),
        drafts("qa", "111", (3.0, 2.0, 2.5)),
        drafts("lambada", "2222", contender="bpd:heads=2"),
        drafts("squad", "111", contender="bpd:heads=2"),
        drafts("qa", "111", contender="bpd:heads=2"),
        drafts("qa", "333", contender="bpd:lookup=4"),
    ]
    return exhibit_of("figure3", records, ["lambada", "squad", "qa", "rag"])


def test_entropy_by_head(full_exhibit):
    table = full_exhibit.tables[0]
    cells = values_of(table)
    assert cells["SQUAD"] == [1.0, 2.0, 1.5, 2.0, 2.0]
    assert cells["QA"] == [3.0, 2.0, 2.5, 1.0, 1.0]
    assert cells["RAG"] == [None] * 5
    assert table.rows[1].cells[-1].paper == 2.08
    lines = full_exhibit.charts[0].series
    assert [line.label for line in lines] == ["LAMBADA", "SQUAD", "QA"]
    assert (lines[0].x, lines[0].y) == ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])


def test_distribution_of_entropies():
    """Head 1: positions at 0 … 0.5 and 0.5 … 1 nats: 1 + 1 and 0 + 2. Head 2: 3 at 0.5
    … 1 and 1 at 1 … 1.5. Four positions in bins of half a nat: shares times 2."""
    records = [
        draft("bpd", "lambada", "11", entropy_counts=["1", "011"]),
        draft("bpd", "lambada", "11", entropy_counts=["12", "02"], example=1),
    ]
    [chart] = exhibit_of("figure3", records, ["lambada"]).charts
    first, second = chart.series
    assert (first.label, first.x, first.y) == ("head 1", [0.25, 0.75], [1.0, 1.0])
    assert (second.x, second.y) == ([0.25, 0.75, 1.25], [0.0, 1.5, 0.5])
    records.append(draft("bpd", "lambada", "11", example=2))  # Of an older version.
    assert exhibit_of("figure3", records, ["lambada"]).charts == []


def test_both_interpretations_are_fitted(full_exhibit):
    """Tasks alone lie on a line. Of all six points, x is 2 3 2 2 1 1 and y 2 3 1 2 1 1:
    means 11/6 and 10/6; Sxx = 17/6, Syy = 20/6, Sxy = 16/6."""
    both, alone = (row.cells for row in full_exhibit.tables[1].rows)
    assert [both[0].value, alone[0].value] == [6, 3]
    assert both[1].value == pytest.approx(16 / 17)
    assert both[2].value == pytest.approx(10 / 6 - 16 / 17 * 11 / 6)
    assert both[3].value == pytest.approx(16 / (17 * 20) ** 0.5)
    assert (alone[1].value, alone[2].value) == pytest.approx((1, 0))
    assert alone[3].value == pytest.approx(1)
    assert alone[3].paper == 0.77
    points, line = full_exhibit.charts[1].series
    assert points.names[0] == "LAMBADA, 2 heads"
    assert line.dashed
    assert line.x == [1.0, 3.0]


def test_findings(full_exhibit):
    # Three heads cannot tell whether entropy grows, nor three tasks whether block
    # efficiency grows with h_max.
    verdicts = [finding.holds for finding in full_exhibit.findings]
    assert verdicts == [None, True, None, None]
    assert "On 2 of 2 tasks" in full_exhibit.findings[1].evidence


def test_head_1_is_not_compared_over_another_vocabulary(full_exhibit):
    """From head 2 on entropy increases; that of head 1 is over more tokens."""
    entropies = (3.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    tasks = ["lambada", "squad", "qa"]
    exhibit = exhibit_of(
        "figure3",
        [drafts(task, "11", entropies) for task in tasks],
        tasks,
        vocabulary=64,
        draft_vocabulary=16,
    )
    table, fits = exhibit.tables
    assert [row.cells[-2].text for row in table.rows] == ["-"] * 3
    assert fits.rows[1].cells[3].value is None
    grows, *others = exhibit.findings
    assert grows.holds is True
    assert "from head 2 on" in grows.evidence
    assert all("Not judged" in finding.evidence for finding in others)
