"""Table 1 from explicit records."""

import math

import pytest

from bpd_jax.reporting.exhibits import Cell
from bpd_jax.studies.study_records import QualityRecord
from experiments import printed
from tests.experiments.builders import draft, exhibit_of, rows_of


def quality(task, example, part="report", text="", **scores):
    return QualityRecord(task, example, part, text, [], scores)


def test_scores_and_efficiency_of_each_task():
    """LAMBADA: 4 tokens of probability 1/2 and 2 of 1/4: exp(8 ln 2 / 6) = 2^(4/3).

    Calls at positions 0 and 3 of `3113` yield 3 + 1 tokens: 2 a call.
    """
    last = {f"last_word{what}": 1.0 for what in ("", "_tokens")}
    last["last_word_log_prob"] = -1.0
    records = [
        quality("lambada", 0, log_prob=4 * math.log(1 / 2), tokens=4.0, **last),
        quality("lambada", 1, log_prob=2 * math.log(1 / 4), tokens=2.0, **last),
        # Two 4-grams of which one is new, then one.
        quality("squad", 0, text="a a a a a", exact_match=0.0, f1=0.5),
        quality("squad", 1, text="a a a a", exact_match=1.0, f1=1.0),
        quality("squad", 2, "tune", exact_match=1.0, f1=1.0),
        draft("bpd", "lambada", "3111"),
        draft("bpd:heads=3", "lambada", "2111"),
        draft("ngram:16", "lambada", "1111"),
    ]
    exhibit = exhibit_of("table1", records, ["lambada", "squad", "qa"])
    table, all_scores = exhibit.tables
    labels = [column.label for column in table.columns]
    assert labels[4:] == ["examples", "repeated 4-grams", "3 heads", "BPD"]
    by_task = rows_of(table)
    cells = by_task["LAMBADA"]
    metric, score, other, other_score, examples, repeated, three, bpd = cells
    assert other.text == "Perplexity of last words"
    assert (other_score.value, other_score.paper) == (pytest.approx(math.e), 7.88)
    assert repeated.text == "-"  # No text is stored.
    assert metric.text == "Perplexity"
    assert score.value == pytest.approx(2 ** (4 / 3))
    assert score.interval == pytest.approx((2, 4))
    assert (score.paper, examples.value) == (7.88, 2)
    assert three == Cell(4 / 3, 1.79)
    assert bpd == Cell(2.0, 3.12)
    metric, score, other, _, _, repeated, _, bpd = by_task["SQUAD"]
    assert repeated.value == pytest.approx(100 / 3)
    assert (metric.text, score) == ("Exact match, %", Cell(50.0, 57.6, (0.0, 100.0)))
    assert bpd == Cell(paper=2.08, text="not measured")
    assert by_task["QA"][0].text == "none"
    scores = rows_of(all_scores)
    assert scores["SQUAD: F1, %"][0] == Cell(75.0, None, (50.0, 100.0))
    assert scores["LAMBADA: Last words right, %"][0].value == 100


@pytest.mark.parametrize(
    "lowest, holds", [("newsroom", True), ("xsum", False), (None, None)]
)
def test_the_order_of_tasks_is_compared_with_the_paper(lowest, holds):
    yields = {lowest: ["1111", "1111"], "lambada": ["3111", "4111"]}
    records = [
        draft("bpd", task, accepted, example=example)
        for task in printed.TASKS
        for example, accepted in enumerate(yields.get(task, ["2121", "2111"]))
    ]
    [finding] = exhibit_of("table1", records, printed.TASKS).findings
    assert finding.holds is holds
    assert "In the paper 3.12 and 1.08" in finding.evidence
    noise = "Within noise of each other: SQUAD and NEWSROOM" in finding.evidence
    assert noise is (lowest != "newsroom")
    assert exhibit_of("table1", records[:3], printed.TASKS).findings[0].holds is None
