"""Figure 6 from explicit records."""

import pytest

from bpd_jax.studies.study_records import OracleRecord
from tests.experiments.builders import draft, exhibit_of, rows_of, values_of


def oracle(task, tokens, calls, example=0):
    return OracleRecord(task, example, "report", tokens, calls)


def build_exhibit(records, tasks=("squad", "qa", "rag")):
    return exhibit_of("figure6", records, tasks)


@pytest.fixture
def records():
    return [
        oracle("squad", 12, [[12, 8, 7], [6, 4, 4]]),
        oracle("squad", 12, [[12, 8, 7], [6, 4, 2]], example=1),
        oracle("qa", 12, [[12, 10, 9], [12, 4, 3]]),
        draft("bpd", "squad", "222222222222"),
        draft("bpd", "squad", "222222222222", example=1),
        draft("zero_gram:16", "squad", "222222333333"),
    ]


def test_block_efficiency_over_candidates(records):
    """SQuAD: 24 / 12, 24 / 8, 24 / 6; all: 36 / 24, 36 / 12, 36 / 9."""
    exhibit = build_exhibit(records)
    table, heads = exhibit.tables
    cells = rows_of(table)
    labels = [column.label for column in table.columns]
    assert labels == ["k = 1", "k = 2", "k = 2 over BPD"]
    assert [cell.value for cell in cells["SQUAD"]] == [2, 3, 50]
    assert [cell.paper for cell in cells["SQUAD"]] == [2.08, 2.16, None]
    assert [cell.value for cell in cells["All"]] == [1.5, 3, 100]
    assert cells["RAG"][0].text == "not measured"
    assert values_of(heads)["SQUAD"] == [24 / 14, 4]
    panels = {chart.name: chart.series for chart in exhibit.charts}
    assert list(panels) == ["figure6_squad", "figure6_qa", "figure6_all"]
    two_heads, three_heads = panels["figure6_all"]
    assert (two_heads.label, three_heads.label) == ("2 heads", "3 heads")
    assert three_heads.y == [1.5, 3.0, 4.0]
    assert two_heads.x == [1.0, 2.0, 3.0]


def test_findings(records):
    findings = build_exhibit(records).findings
    verdicts = [finding.holds for finding in findings]
    assert verdicts == [True, True, True, None, True, True]
    single, _, falling, *_, bounds = findings
    assert single.evidence == "Equal on 2 of 2 texts."
    # From 1.5 over 3 to 4 tokens a call.
    assert "+1.500 tokens per call" in falling.evidence
    # 16-best takes 3 + 2 calls where the oracle takes 4; BPD itself does not count.
    assert bounds.evidence.startswith(
        "Of 1 method on each task, zero_gram:16 on SQUAD is the closest: it needs 1.25"
    )


def test_a_violated_bound_is_detected(records):
    """A text of BPD that takes fewer calls than the oracle with one candidate."""
    records[3] = draft("bpd", "squad", "444444444444")
    findings = build_exhibit(records).findings
    assert findings[0].holds is False
    assert findings[-1].holds is True
    # And one of refined drafts that takes 2 calls where the oracle takes 4.
    records[5] = draft("zero_gram:16", "squad", "666666666666")
    assert build_exhibit(records).findings[-1].holds is False
