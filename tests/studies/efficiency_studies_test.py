"""Tables of block efficiency, from small records with values computed by hand."""

import dataclasses
import pathlib

import pytest

from bpd_jax.studies.comparisons import never_below, weak_gain_most
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_catalog import find_study
from bpd_jax.studies.study_records import REPORT, TUNE, DraftRecord

TASKS = {"squad": "SQuAD", "xsum": "XSum"}


def draft(contender, task, example, accepted, *, equal=0, part=REPORT, nodes=10):
    """A text whose drafts have three tokens, with `equal` equal pairs each."""
    count = len(accepted)
    return DraftRecord(
        task=task,
        example=example,
        part=part,
        contender=contender,
        accepted=accepted,
        length="3" * count,
        equal=str(equal) * count,
        longest=str(1 + equal) * count,
        nodes=nodes,
    )


def run_of(study, records, **facts):
    labels = {record.contender: record.contender.upper() for record in records}
    all_facts = {"tasks": TASKS, "labels": labels, **facts}
    return StudyRun(pathlib.Path("run"), study, all_facts, records)


# SQuAD: BPD needs 4 calls for 6 tokens (2 + 1 + 1 + 2), 4-grams 3, the oracle 2.
# XSum: BPD needs 4 for 4, 4-grams 2, the oracle 2.
SQUAD = {"bpd": "211121", "ngram:16": "212121", "oracle": "321321"}
XSUM = {"bpd": "1111", "ngram:16": "2121", "oracle": "2121"}


def records():
    drafts = [draft(name, "squad", 0, accepted) for name, accepted in SQUAD.items()]
    drafts += [draft(name, "xsum", 0, accepted) for name, accepted in XSUM.items()]
    # Tuning examples are not reported.
    return [*drafts, draft("bpd", "xsum", 1, "4444", part=TUNE)]


def values(table):
    return {row.label: [cell.value for cell in row.cells] for row in table.rows}


def test_table4_has_efficiency_gain_and_headroom():
    printed = {"bpd": "bpd", "ngram:16": "16x4g", "oracle": "oracle16"}
    exhibit = find_study("table4").exhibit(run_of("table4", records(), printed=printed))
    efficiency, gain, headroom = exhibit.tables
    assert [column.label for column in efficiency.columns] == [
        "BPD",
        "NGRAM:16",
        "ORACLE",
    ]
    assert values(efficiency) == {
        "SQuAD": [6 / 4, 2.0, 3.0],
        "XSum": [1.0, 2.0, 2.0],
        "all": [10 / 8, 2.0, 2.5],
    }
    assert [cell.paper for cell in efficiency.rows[0].cells] == [2.08, 2.22, 2.45]
    assert [cell.paper for cell in efficiency.rows[2].cells] == [None] * 3
    gains = {label: row[0] for label, row in values(gain).items()}
    assert gains["SQuAD"] == pytest.approx(100 / 3)
    assert gains["all"] == pytest.approx(60)
    paper = gain.rows[0].cells[0].paper
    assert paper == pytest.approx(100 * (2.22 / 2.08 - 1))
    shares = {label: row[0] for label, row in values(headroom).items()}
    assert shares["SQuAD"] == pytest.approx(100 / 3)  # of 1.5 … 3.0
    assert shares["XSum"] == pytest.approx(100)
    assert shares["all"] == pytest.approx(100 * 0.75 / 1.25)


def test_findings_of_table4():
    findings = {f.statement: f for f in exhibit_of("table4", records()).findings}
    bound = findings["The oracle is an upper bound for all drafts from its lattice."]
    assert bound.holds
    # On XSum 4-grams do as well as the oracle.
    assert "Higher on 1 of 2 tasks, equal on 1" in bound.evidence
    zero = findings["The p best 0-gram drafts yield at least as many tokens as BPD."]
    assert zero.holds is None
    weak = findings[
        "Tasks on which BPD has a low block efficiency gain most (NGRAM:16)."
    ]
    assert weak.holds is None  # two tasks are too few


def test_table4_prefers_contenders_with_printed_values():
    """Of two n-gram models, the one with printed values is compared."""
    accepted = {"bpd": "1111", "ngram:16": "4321"}
    accepted |= {"ngram:1@corpus": "2121", "ngram:16@corpus": "2121"}
    drafts = [draft(name, "squad", 0, lengths) for name, lengths in accepted.items()]
    for printed, holds in (({}, None), ({"ngram:16@corpus": "16x4g"}, False)):
        exhibit = exhibit_of("table4", drafts, printed=printed)
        (best,) = [f for f in exhibit.findings if "single best" in f.statement]
        assert best.holds is holds  # the first has no single best beside it
        assert ("CORPUS" in best.statement) is (printed != {})


def test_drafts_outside_the_lattice_are_not_bounded():
    names = ("hydra:1", "medusa:4:lookup=4")
    unbounded = [draft(name, "squad", 0, "654321") for name in names]
    findings = {
        f.statement: f for f in exhibit_of("table4", records() + unbounded).findings
    }
    assert findings[
        "The oracle is an upper bound for all drafts from its lattice."
    ].holds


def exhibit_of(study, records, **facts):
    return find_study(study).exhibit(run_of(study, records, **facts))


def test_an_oracle_below_a_method_fails():
    with_low_oracle = [
        r for r in records() if (r.contender, r.task) != ("oracle", "squad")
    ]
    with_low_oracle.append(draft("oracle", "squad", 0, "111111"))
    findings = {f.statement: f for f in exhibit_of("table4", with_low_oracle).findings}
    bound = findings["The oracle is an upper bound for all drafts from its lattice."]
    assert bound.holds is False
    assert "Not on SQuAD." in bound.evidence


def test_table3_compares_before_and_after():
    """Half of the two pairs equal before, none after; runs of 2 and of 1."""
    drafts = [draft("bpd", task, 0, "1111", equal=1) for task in TASKS]
    drafts += [draft("ngram:1", task, 0, "1111", equal=0) for task in TASKS]
    exhibit = exhibit_of("table3", drafts, printed={"ngram:1": "after"})
    (table,) = exhibit.tables
    assert values(table)["all"] == [50.0, 0.0, 2.0, 1.0]
    assert [cell.paper for cell in table.rows[0].cells] == [75.5, 67.6, 6.6, 6.1]
    assert [finding.holds for finding in exhibit.findings] == [True]
    (chart,) = exhibit.charts
    assert [series.y for series in chart.series] == [[50.0, 50.0], [0.0, 0.0]]


def test_the_length_of_drafts_is_a_fact():
    longer = dataclasses.replace(draft("ngram:4", "squad", 0, "11"), length="44")
    drafts = [draft("bpd", "squad", 0, "21"), longer]
    assert exhibit_of("table4", drafts).facts["block_size"] == 3
    assert exhibit_of("table4", [longer]).facts["block_size"] is None


def test_table7_compares_general_and_in_domain_models():
    general, in_domain = "ngram:1@general_2", "ngram:1@in_domain"
    drafts = [draft(general, "squad", 0, "2121"), draft(in_domain, "squad", 0, "1111")]
    drafts += [draft(general, "xsum", 0, "1111"), draft(in_domain, "xsum", 0, "2121")]
    exhibit = exhibit_of("table7", drafts)
    (finding,) = exhibit.findings
    assert finding.holds is False  # one of two is not most
    assert "Higher on 1 of 2 tasks" in finding.evidence
    assert "Not on XSum." in finding.evidence
    assert any("n-gram half" in note for note in exhibit.notes)
    # Rescorers are compared with rescorers.
    drafts += [draft("neural:1@general_neural", task, 0, "2121") for task in TASKS]
    drafts += [draft("neural:1@in_domain_neural", task, 0, "1111") for task in TASKS]
    exhibit = exhibit_of("table7", drafts)
    assert [finding.holds for finding in exhibit.findings] == [False, True]
    assert not any("n-gram half" in note for note in exhibit.notes)


def test_table10_orders_heads():
    drafts = [
        draft("bpd", "squad", 0, "321321"),
        draft("bpd:heads=6", "squad", 0, "21"),
    ]
    drafts.append(draft("bpd:heads=3", "squad", 0, "111111"))
    exhibit = exhibit_of("table10", drafts)
    # From 3 heads to 6, and from 6 to all: 1 → 2 → 3 tokens a call.
    assert [finding.holds for finding in exhibit.findings] == [True, True]
    assert "BPD:HEADS=6 against BPD:HEADS=3" in exhibit.findings[0].statement


def test_table10_notes_drafts_that_are_shorter_than_the_papers():
    shorter = draft("bpd", "squad", 0, "321")
    equal = dataclasses.replace(shorter, length="998")
    notes = [exhibit_of("table10", [each]).notes for each in (shorter, equal)]
    assert len(notes[0]) == len(notes[1]) + 1
    assert "3 tokens at most" in notes[0][0]


def test_figure7_has_diminishing_returns():
    """1, 2 and 2.5 tokens a call with 1, 2 and 4 drafts: slopes of 1 and of 1/4."""
    drafts = [
        draft(f"ngram:{p}@own_2", "squad", 0, accepted)
        for p, accepted in {1: "1" * 10, 2: "21" * 5, 4: "5432132132"[:10]}.items()
    ]
    exhibit = exhibit_of("figure7", drafts)
    chart_of_all = next(chart for chart in exhibit.charts if chart.name == "figure7")
    (series,) = chart_of_all.series
    assert series.x == [1.0, 2.0, 4.0]
    # 5 + 3 + 2 tokens in three calls.
    assert series.y == [1.0, 2.0, pytest.approx(10 / 3)]
    (finding,) = exhibit.findings
    assert finding.holds  # (10/3 - 2) / 2 is less than 1


def test_a_comparison_names_the_tasks_that_contradict_it():
    run = run_of("table4", [])
    finding = never_below(
        run, "A.", {"squad": 2.0, "xsum": 1.0}, {"squad": 1, "xsum": 2}
    )
    assert finding.holds is False
    assert finding.evidence == (
        "Higher on 1 of 2 tasks; mean difference +25.0 %. Not on XSum."
    )
    equal = {"squad": 1.0}
    assert never_below(run, "A.", equal, equal).holds
    assert not never_below(run, "A.", equal, equal, strictly=True).holds
    assert never_below(run, "A.", {}, equal).holds is None


def test_weak_tasks_gain_most_if_ranks_are_anticorrelated():
    base = {task: 1.0 + number for number, task in enumerate("abcdef")}
    falling = {task: value + 1 for task, value in base.items()}  # by 100, 50, 33 … %
    growing = {task: value**2 for task, value in base.items()}
    assert weak_gain_most("W.", base, falling).holds is True
    assert "−1.00" in weak_gain_most("W.", base, falling).evidence
    assert weak_gain_most("W.", base, growing).holds is False
    three_tasks = {task: base[task] for task in "abc"}
    assert weak_gain_most("W.", three_tasks, falling).holds is None


@pytest.mark.parametrize(
    "study", ["table3", "table4", "table7", "table10", "figure7", "searches"]
)
def test_incomplete_runs_are_shown(study):
    """One of two tasks, one contender; then another contender on half of the texts."""
    drafts = [draft("bpd", "squad", number, "211") for number in range(4)]
    exhibit = exhibit_of(study, drafts)
    assert exhibit.tables
    assert not any(finding.holds for finding in exhibit.findings)
    drafts += [draft("ngram:4", "squad", number, "211") for number in (1, 3)]
    assert exhibit_of(study, drafts).tables
    # One text of the next contender has no interval; the oracle is incomplete.
    drafts += [draft("ngram:8", "squad", 0, "211"), draft("ngram:8", "xsum", 0, "31")]
    drafts += [draft("oracle", task, 0, "321") for task in (*TASKS, "rag")]
    assert exhibit_of(study, drafts, tasks={**TASKS, "rag": "RAG"}).tables
