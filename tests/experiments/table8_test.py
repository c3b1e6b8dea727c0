"""Table 8 from explicit records."""

import pytest

from tests.experiments.builders import draft, exhibit_of, rows_of, values_of

TEN = {5: "2222222222", 10: "1111111111", 2: "5555555555", 4: "3333333333"}
"""Accepted tokens at each of ten positions, by the resulting number of calls."""


def drafts(task, contender, calls, part="report", example=0):
    return draft(contender, task, TEN[calls], part=part, example=example)


def build_exhibit(records, tasks=("squad", "qa"), **facts):
    return exhibit_of("table8", records, tasks, **facts)


def test_alpha_is_chosen_on_tuning_examples_and_reported_on_others():
    """alpha = 2 takes 2 calls on tuning texts and 5 on others, alpha = 1 takes 4.

    alpha = 0 is shown by a mark alone.
    """
    family = {0.0: (10, 10), 1.0: (4, 4), 2.0: (2, 5)}
    records = [drafts("squad", "bpd", 10), drafts("squad", "oracle", 2)]
    for alpha, (tune, report) in family.items():
        name = f"ngram:1:alpha={alpha:g}@own"
        records += [drafts("squad", name, tune, "tune"), drafts("squad", name, report)]
    # Not part of a family: one without a weight, one without other weights.
    records.append(drafts("squad", "ngram:1@own", 5))
    records.append(drafts("squad", "neural:1:alpha=1", 5))
    labels = {"ngram:1:alpha=0@own": "1-best (k 4, alpha 0.0)"}
    exhibit = build_exhibit(records, labels=labels)
    [table] = exhibit.tables
    assert table.title == "The weight alpha: 1-best (k 4)"
    squad = rows_of(table)["SQUAD"]
    assert squad[0].paper == 0.75
    # 2 tokens a call, of 1 by BPD and 5 by the oracle: a quarter of the way.
    values = values_of(table)
    assert values["SQUAD"] == pytest.approx([2, 2, 100, 1, 25, 10 / 4, 1, 2.5])
    assert values["All, one alpha"] == values["SQUAD"]
    assert rows_of(table)["QA"][0].text == "not measured"
    [chart] = exhibit.charts
    assert [line.label for line in chart.series] == ["SQUAD", "All"]
    assert (chart.series[0].x, chart.series[0].y) == ([1.0, 2.0], [2.5, 2.0])
    _, flattery = exhibit.findings
    assert flattery.holds is False
    assert flattery.evidence.startswith("25.00 % on average over 1 task,")
    assert table.caption.startswith("Tuned on 1 held-out example of each task; the")
    assert (squad[0].text, squad[6].text, "*" in table.caption) == ("", "", False)


def test_cells_are_marked_where_no_rescorer_is_better():
    """On the tuning text alpha = 0 takes 4 calls, 1 takes 5; on the other, 10 and 5."""
    records = [
        drafts("squad", f"ngram:1:alpha={alpha}", calls, part)
        for part, numbers in (("tune", (4, 5, 10)), ("report", (10, 5, 10)))
        for alpha, calls in enumerate(numbers)
    ]
    [table] = build_exhibit(records).tables
    squad = rows_of(table)["SQUAD"]
    assert (squad[0].value, squad[0].text) == (1.0, "*")
    assert (squad[6].value, squad[6].text) == (1.0, "")
    assert "* On the examples that it was tuned on, alpha = 0" in table.caption


def test_only_common_examples_count():
    """Example 1 was recorded for only one alpha before the run was stopped."""
    records = [
        drafts("squad", f"ngram:1:alpha={alpha}", calls, part, example)
        for alpha, calls, example in [(1, 4, 0), (2, 5, 0), (2, 2, 1)]
        for part in ("tune", "report")
    ]
    [table] = build_exhibit(records).tables
    squad = rows_of(table)["SQUAD"]
    assert (squad[0].value, squad[1].value) == (1.0, 2.5)
    assert squad[2].text == squad[3].text == squad[4].text == "not measured"


def test_weight_decreases_with_bpds_efficiency():
    """BPD takes 10, 5 and 4 calls; alphas 2, 1 and 0.5 are best."""
    records = []
    best = {"a": (10, 2.0), "b": (5, 1.0), "c": (4, 0.5)}
    for task, (base, best_alpha) in best.items():
        records.append(drafts(task, "bpd", base))
        for alpha in (0.5, 1.0, 2.0):
            for part in ("tune", "report"):
                calls = 2 if alpha == best_alpha else 4
                records.append(drafts(task, f"neural:1:alpha={alpha:g}", calls, part))
    small, flattery = build_exhibit(records, tuple(best)).findings
    assert small.holds is None  # three tasks cannot tell
    assert "over 3 tasks: −1.00 (p = 0.3" in small.evidence
    assert flattery.holds is True


def test_searches_are_compared_with_themselves_under_their_own_weight():
    """The tree's best weight on tuning texts is 0.25, that of one draft would be 1."""
    records = [
        drafts("squad", name, calls, part, example)
        for name, (tune, report) in {
            "zero_gram:16:search=best": (5, 5),
            "ngram:16:search=best:alpha=0.25@own": (2, 4),
            "ngram:16:search=best:alpha=1@own": (10, 10),
            "ngram:1:alpha=0.25@own": (10, 10),
            "ngram:1:alpha=1@own": (2, 2),
        }.items()
        for part, calls in (("tune", tune), ("report", report))
        for example in range(2)
    ]
    *_, table = build_exhibit(records, ("squad",)).tables
    [(label, values)] = values_of(table).items()
    assert table.name == "table8_searches"
    assert label == "ngram:16:search=best@own"
    assert values == pytest.approx([2, 0.2, 0.25, 2.5, 0.25, 25])
