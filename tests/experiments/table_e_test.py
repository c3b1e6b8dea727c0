import pytest

from bpd_jax.studies.study_records import TimingRecord
from tests.experiments.builders import exhibit_of, rows_of

LABELS = {
    "medusa:8": "Medusa",
    "ngram:1@general_2": "1-best 2-gram",
    "bpd": "BPD",
    "lookahead:4": "Lookahead",
    "medusa_ngram:8": "Medusa, 2-gram",
}


def record(contender, task="qa", example=0, *, calls, seconds, **fields):
    """A timing of twelve tokens, by default of greedy decoding."""
    plain = {"temperature": 0.0, "round": 0, "tokens": 12, "identical": True}
    about = {"task": task, "example": example, "contender": contender}
    return TimingRecord(calls=calls, seconds=seconds, **about, **{**plain, **fields})


def build_exhibit(*records):
    return exhibit_of("table_e", records, ("math", "qa", "rag"), labels=LABELS)


def measured(exhibit):
    """Tables and findings of the run, without those of the printed Table E."""
    tables = [t for t in exhibit.tables if not t.name.startswith("table_e_vicuna")]
    findings = [f for f in exhibit.findings if not f.statement.startswith("Table E as")]
    return tables, findings


def test_speedups_are_ratios_of_sums_over_the_same_prompts_and_rounds():
    exhibit = build_exhibit(
        record("greedy", calls=12, seconds=4.0),
        record("greedy", example=1, calls=12, seconds=2.0),
        record("greedy", round=1, calls=12, seconds=6.0),
        record("bpd", calls=6, seconds=2.0),
        record("bpd", example=1, calls=4, seconds=1.0),
        # Of a round in which plain decoding was not timed: no speed, only calls.
        record("bpd", round=2, calls=6, seconds=99.0),
        record("greedy", "math", calls=12, seconds=1.0),
    )
    table = measured(exhibit)[0][0]
    groups = [column.group for column in table.columns]
    assert groups == ["MATH", "MATH", "QA", "QA", "All", "All"]
    rows = rows_of(table)
    math_tokens, math_speed, tokens, speed, all_tokens, all_speed = rows["BPD"]
    assert math_tokens.text == math_speed.text == "not measured"
    # 36 tokens in 6 + 4 + 6 calls; 4 + 2 seconds against 2 + 1.
    assert tokens.value == 36 / 16
    assert speed.value == pytest.approx((4 + 2) / (2 + 1))
    # Each prompt has the same speedup: 4 / 2 and 2 / 1.
    assert speed.interval == pytest.approx((2, 2))
    # One category is missing, so that there is no value for all.
    assert all_tokens.text == all_speed.text == "not measured"
    assert [cell.value for cell in rows["Greedy"]] == [1.0] * 6


def test_texts_of_different_lengths_are_compared_per_token():
    other = {"temperature": 1.0, "tokens": 24, "identical": None}
    exhibit = build_exhibit(
        record("greedy", temperature=1.0, calls=12, seconds=6.0),
        record("bpd (speculative)", calls=8, seconds=4.0, **other),
    )
    table = measured(exhibit)[0][0]
    assert table.name == "table_e_t1"
    tokens, speed, *_ = rows_of(table)["BPD, speculative sampling"]
    assert tokens.value == 24 / 8
    assert speed.value == pytest.approx((6 / 12) / (4 / 24))


def test_refined_methods_follow_the_methods_that_they_refine():
    exhibit = build_exhibit(
        *(
            record(name, example=example, calls=calls, seconds=seconds)
            for name, calls, seconds in (
                ("ngram:1@general_2", 5, 4.0),
                ("lookahead:4", 10, 3.0),
                ("greedy", 12, 6.0),
                ("bpd", 6, 3.0),
            )
            for example in range(6)
        )
    )
    table, refinement = measured(exhibit)[0]
    labels = [row.label for row in table.rows]
    assert labels == ["Greedy", "BPD", "1-best 2-gram", "Lookahead"]
    (row,) = refinement.rows
    assert row.label == "BPD → 1-best 2-gram"
    # Calls fall from 6 to 5; seconds rise from 3 to 4.
    assert [cell.value for cell in row.cells] == pytest.approx([20, 3 / 4])
    lossless, tokens, speed = measured(exhibit)[1]
    assert (lossless.holds, tokens.holds, speed.holds) == (True, True, False)
    assert tokens.evidence == "+20.0 % (+20.0 … +20.0) at T = 0, 6 prompts."
    assert speed.statement == "BPD refined: 1-best 2-gram is faster."
    assert table.caption.endswith("Prompts: QA 6.")
    chart = exhibit.charts[0]
    assert chart.categories[0] == "BPD"
    assert chart.series[0].y[:2] == pytest.approx([6 / 3, 6 / 4])


def test_the_printed_table_e_is_shown_with_our_values():
    exhibit = build_exhibit(
        record("greedy", calls=12, seconds=6.0),
        record("neural:1", calls=5, seconds=4.0),
        record("bpd", calls=6, seconds=3.0),
        # The printed Medusa does not use prompt lookup.
        record("medusa:8:lookup=8", calls=6, seconds=3.0),
        record("medusa:8", calls=6, seconds=2.0),
        record("medusa:8", temperature=1.0, calls=6, seconds=0.1),
        # The authors measured the variant of their slides.
        record("medusa_neural:8:order=block", calls=6, seconds=1.5),
    )
    small, large = [t for t in exhibit.tables if t.name.startswith("table_e_vicuna")]
    assert [column.label for column in small.columns][2] == "QA"
    rows = rows_of(small)
    assert len(rows) == 7
    assert (rows["BPD"][2].value, rows["BPD"][2].paper) == (2.0, 1.489)
    assert rows["Medusa"][2].value == 3.0
    assert rows["BPD, local rescoring: neural:1"][2].value == 1.5
    slides = rows["Medusa, local rescoring: medusa_neural:8:order=block"]
    assert slides[2].value == 4.0
    lookahead = rows["Lookahead"][2]
    assert (lookahead.value, lookahead.paper) == (None, 1.503)
    assert rows["BPD"][0].text == "not measured"
    assert large.rows[-1].cells[3].paper == 2.519


def test_categories_of_mt_bench_are_shown_separately_and_together():
    """The printed column is that of all categories: sums over their prompts."""
    exhibit = build_exhibit(
        record("greedy", "writing", calls=12, seconds=6.0),
        record("bpd", "writing", calls=6, seconds=2.0),
        record("greedy", "coding", calls=12, seconds=6.0),
        record("bpd", "coding", calls=4, seconds=1.0),
        record("greedy", calls=12, seconds=6.0),
        record("bpd", calls=12, seconds=6.0),
        record("medusa:8", "writing", calls=4, seconds=1.0),
    )
    table = measured(exhibit)[0][0]
    groups = [column.group for column in table.columns[::2]]
    assert groups == ["QA", "coding", "writing", "MT-Bench, all", "All"]
    rows = rows_of(table)
    values = [cell.value for cell in rows["BPD"]]
    assert values[4:] == pytest.approx([12 / 6, 3, 24 / 10, 4, 36 / 22, 2])
    # Measured in one category of two.
    assert rows["Medusa"][6].text == "not measured"
    printed = next(t for t in exhibit.tables if t.name == "table_e_vicuna_7b")
    rows = rows_of(printed)
    assert rows["BPD"][0].value == 4
    assert rows["BPD"][2].value == 1
    assert rows["Medusa"][0].text == "not measured"
