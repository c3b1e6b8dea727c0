"""Tables of block efficiency, from small records with values computed by hand."""

import dataclasses

import pytest

from bpd_jax.studies.claims import Effect
from bpd_jax.studies.study_records import TUNE, EngineRecord
from experiments.comparisons import trend_finding
from tests.experiments import builders
from tests.experiments.builders import draft, values_of

TASKS = ("squad", "xsum")


def exhibit_of(study, records, tasks=TASKS, **facts):
    labels = {record.contender: record.contender.upper() for record in records}
    return builders.exhibit_of(study, records, tasks, labels=labels, **facts)


# SQuAD: BPD needs 4 calls for 6 tokens (2 + 1 + 1 + 2), 4-grams 3, the oracle 2.
# XSum: BPD needs 4 for 4, 4-grams 2, the oracle 2.
SQUAD = {"bpd": "211121", "ngram:16": "212121", "oracle": "321321"}
XSUM = {"bpd": "1111", "ngram:16": "2121", "oracle": "2121"}


def records():
    drafts = [draft(name, "squad", accepted) for name, accepted in SQUAD.items()]
    drafts += [draft(name, "xsum", accepted) for name, accepted in XSUM.items()]
    # Tuning examples are not reported.
    return [*drafts, draft("bpd", "xsum", "4444", example=1, part=TUNE)]


def test_table4_has_efficiency_gain_and_headroom():
    printed = {"bpd": "bpd", "ngram:16": "16x4g", "oracle": "oracle16"}
    exhibit = exhibit_of("table4", records(), printed=printed)
    efficiency, gain, headroom = exhibit.tables
    labels = [column.label for column in efficiency.columns]
    assert labels == ["BPD", "NGRAM:16", "ORACLE"]
    assert values_of(efficiency) == {
        "SQUAD": [6 / 4, 2.0, 3.0],
        "XSUM": [1.0, 2.0, 2.0],
        "all": [10 / 8, 2.0, 2.5],
    }
    assert [cell.paper for cell in efficiency.rows[0].cells] == [2.08, 2.22, 2.45]
    assert [cell.paper for cell in efficiency.rows[2].cells] == [None] * 3
    gains = {label: row[0] for label, row in values_of(gain).items()}
    assert gains["SQUAD"] == pytest.approx(100 / 3)
    assert gains["all"] == pytest.approx(60)
    paper = gain.rows[0].cells[0].paper
    assert paper == pytest.approx(100 * (2.22 / 2.08 - 1))
    shares = {label: row[0] for label, row in values_of(headroom).items()}
    assert shares["SQUAD"] == pytest.approx(100 / 3)  # of 1.5 … 3.0
    assert shares["XSUM"] == pytest.approx(100)
    assert shares["all"] == pytest.approx(100 * 0.75 / 1.25)


def test_findings_of_table4():
    findings = {f.statement: f for f in exhibit_of("table4", records()).findings}
    bound = findings["The oracle is an upper bound for all drafts from its lattice."]
    assert bound.holds
    # On XSum 4-grams do as well as the oracle.
    assert "Higher on 1 of 2 tasks, equal on 1" in bound.evidence
    zero = findings["The p best 0-gram drafts yield at least as many tokens as BPD."]
    assert zero.holds is None


def test_table3_compares_before_and_after():
    """Half of the two pairs equal before, none after; runs of 2 and of 1.

    Before, decoding makes calls only at positions 0 and 3, but all positions count.
    """
    drafts = [
        draft("bpd", task, "3111", equal="0220", longest="1331") for task in TASKS
    ]
    drafts += [draft("ngram:1", task, "1111") for task in TASKS]
    exhibit = exhibit_of("table3", drafts, printed={"ngram:1": "after"})
    (table,) = exhibit.tables
    assert values_of(table)["all"] == [50.0, 0.0, 2.0, 1.0]
    assert [cell.paper for cell in table.rows[0].cells] == [75.5, 67.6, 6.6, 6.1]
    assert [finding.holds for finding in exhibit.findings] == [True]
    (chart,) = exhibit.charts
    assert [series.y for series in chart.series] == [[50.0, 50.0], [0.0, 0.0]]


def test_table7_compares_general_and_in_domain_models():
    general, in_domain = "ngram:1@general_2", "ngram:1@in_domain"
    drafts = [draft(general, "squad", "2121"), draft(in_domain, "squad", "1111")]
    drafts += [draft(general, "xsum", "1111"), draft(in_domain, "xsum", "2121")]
    exhibit = exhibit_of("table7", drafts)
    (finding,) = exhibit.findings
    assert finding.holds is False  # one of two is not most
    assert "Higher on 1 of 2 tasks" in finding.evidence
    assert "Not on XSUM." in finding.evidence
    assert any("n-gram half" in note for note in exhibit.notes)


def test_table4_counts_the_calls_in_which_openfst_drafts_differently():
    records = [
        EngineRecord("squad", example, "report", "ngram_fst:16", same, 3.0, 0.5)
        for example, same in enumerate(("1101", "1111", "1110"))
    ]
    records += [
        draft(name, "squad", accepted)
        for name, accepted in (("ngram:16", "2121"), ("ngram_fst:16", "2131"))
    ]
    tables = {table.name: table for table in exhibit_of("table4", records).tables}
    [row] = values_of(tables["table4_engines"]).values()
    assert row == [12, pytest.approx(100 * 2 / 12), 25.0, 3.0, 0.5]


def test_table10_orders_heads():
    accepted = {"bpd": "321321", "bpd:heads=6": "21", "bpd:heads=3": "111111"}
    drafts = [draft(name, "squad", digits) for name, digits in accepted.items()]
    exhibit = exhibit_of("table10", drafts)
    # From 3 heads to 6, and from 6 to all: 1 → 2 → 3 tokens a call.
    assert [finding.holds for finding in exhibit.findings] == [True, True]
    assert "BPD:HEADS=6 against BPD:HEADS=3" in exhibit.findings[0].statement


def test_figure7_has_diminishing_returns():
    """1, 2 and 2.5 tokens a call with 1, 2 and 4 drafts: slopes of 1 and of 1/4."""
    drafts = [
        draft(f"ngram:{p}@own_2", "squad", accepted)
        for p, accepted in {1: "1" * 10, 2: "21" * 5, 4: "5432132132"[:10]}.items()
    ]
    exhibit = exhibit_of("figure7", drafts)
    (series,) = {chart.name: chart for chart in exhibit.charts}["figure7"].series
    assert series.x == [1.0, 2.0, 4.0]
    # 5 + 3 + 2 tokens in three calls.
    assert series.y == [1.0, 2.0, pytest.approx(10 / 3)]
    (finding,) = exhibit.findings
    assert finding.holds  # (10/3 - 2) / 2 is less than 1


@pytest.mark.parametrize(
    ("study", "first", "others"),
    [
        ("table4", "bpd", {"zero_gram:16": "2121"}),
        ("figure7", "ngram:1", {"ngram:2": "2121", "ngram:4": "3211"}),
    ],
)
def test_findings_of_an_interrupted_run_are_of_the_same_texts(study, first, others):
    """The first contender has nine texts, of which it does worst on the first one.

    The others have only that one. They do better on it than the first contender, but
    worse than this has done on all texts.
    """
    drafts = [draft(first, "squad", "1111", equal="2222")]
    drafts += [draft(first, "squad", "4321", example=n) for n in range(1, 9)]
    drafts += [
        draft(name, "squad", accepted, equal="1111")
        for name, accepted in others.items()
    ]
    assert exhibit_of(study, drafts).findings[0].holds


@pytest.mark.parametrize(
    "study", ["table3", "table4", "table7", "table10", "figure7", "searches"]
)
def test_incomplete_runs_are_shown(study):
    """One of two tasks, one contender; then another contender on half of the texts."""
    drafts = [draft("bpd", "squad", "211", example=number) for number in range(4)]
    exhibit = exhibit_of(study, drafts)
    assert exhibit.tables
    assert not any(finding.holds for finding in exhibit.findings)
    drafts += [draft("ngram:4", "squad", "211", example=number) for number in (1, 3)]
    assert exhibit_of(study, drafts).tables
    # One text of the next contender has no interval; the oracle is incomplete.
    drafts += [draft("ngram:8", "squad", "211"), draft("ngram:8", "xsum", "31")]
    drafts += [draft("oracle", task, "321") for task in (*TASKS, "rag")]
    assert exhibit_of(study, drafts, tasks=[*TASKS, "rag"]).tables


def test_trends_are_judged_by_the_rule_of_claims():
    known = Effect(0.8, (0.3, 1.0), "", note="reliabilities 0.90, 0.80")
    found = trend_finding("Weak tasks gain most.", [known])
    assert found.holds is True
    assert "+0.80 (+0.30…+1.00); reliabilities 0.90, 0.80" in found.evidence
    assert (
        trend_finding("W.", [dataclasses.replace(known, reliable=False)]).holds is None
    )
    assert trend_finding("W.", []).holds is None
