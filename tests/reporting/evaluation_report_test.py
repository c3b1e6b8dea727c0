"""The report of an evaluation: its numbers, sentences, exhibits and page."""

import dataclasses
import io
import math

import pytest
from rich.console import Console

from bpd_jax.reporting import cell_text, formatting
from bpd_jax.reporting.evaluation_report import (
    key_figures,
    loss_charts,
    methods_exhibit,
    page_of,
    print_table,
)
from bpd_jax.reporting.glossary import DEFINITIONS
from bpd_jax.reporting.page import render
from bpd_jax.reporting.records import Step
from tests.reporting.page_test import Parsed


def with_changed_method(report, name, **changes):
    methods = [
        dataclasses.replace(method, **changes) if method.name == name else method
        for method in report.methods
    ]
    return dataclasses.replace(report, methods=methods)


def test_visible_pieces_have_one_line_and_no_control_characters():
    assert formatting.visible(" x\n\té漢") == " x⏎⇥é漢"
    assert formatting.visible("\x1b[31m\u202e\udc80") == "\\x1b[31m\\u202e\\udc80"


def test_facts_are_written_for_readers():
    facts = (True, None, 12_000, 0.9, [2, 4], {"a": 1, "b": 2.5})
    words = ["yes", "—", "12,000", "0.9", "2, 4", "a 1, b 2.5"]
    assert [formatting.fact(value) for value in facts] == words


def test_key_figures_are_those_of_the_best_method_beside_the_fastest(report):
    """The oracle is neither; savings stand beside the speed."""
    changes = {"block_efficiency": 2.5, "gain": 0.12, "serial_calls": 40, "tokens": 100}
    report = with_changed_method(report, "ngram_p", **changes, speedup=1.1)
    report = with_changed_method(report, "bpd", speedup=1.25, automatic=True)
    assert [(f.name, f.value, f.note) for f in key_figures(report)] == [
        ("Block efficiency", "2.50", "16-best 4-gram"),
        ("Gain over BPD", "+12.0 %", "in block efficiency"),
        ("Serial calls saved", "60.0 %", "against one call per token"),
        ("Speed-up", "1.10 ×", "fastest: BPD ← auto, 1.25 ×"),
        ("Outputs that differ", "0", "from greedy decoding"),
    ]
    ties = with_changed_method(report, "bpd", differing=2, near_ties=2)
    assert key_figures(ties)[4].note == "all at near-ties"
    for near_ties, verdict in ((2, "2 near-ties"), (1, "1 DIFFERENT")):
        bpd = dataclasses.replace(report.methods[1], differing=2, near_ties=near_ties)
        assert bpd.verdict == verdict


def rows_of(report):
    """Texts of every row of all tables, by title of the table and label of the row."""
    return {
        (table.name, row.label): [
            cell_text.measured(cell, column)
            for cell, column in zip(row.cells, table.columns, strict=True)
        ]
        for table in methods_exhibit(report).tables
        for row in table.rows
    }


def test_tables_have_the_numbers_of_every_method(report):
    bpd = dataclasses.replace(
        report.methods[1],
        block_efficiency=1.5,
        seconds=1.25,
        speedup=1.31,
        nodes=6.04,
        accepted=[0.125, 0.875],
        repeated=0.5,
        longest_run=1.5,
        entropies=[1.0, 2.0, 3.25],
        automatic=True,
    )
    whole = report
    report = dataclasses.replace(report, methods=[report.methods[0], bpd], records=[])
    rows = rows_of(report)
    calls, tokens = str(bpd.serial_calls), str(bpd.tokens)
    assert rows["methods", "BPD ← auto"] == [
        "1.50", "—", calls, tokens, "1.25 s", "1.31", "identical ✓"
    ]  # fmt: skip
    figures = ["6.0", "12.5 %", "50.0 %", "1.50", "1.00 … 3.25"]
    assert rows["drafts", "BPD"] == figures
    assert ("drafts", "Greedy") not in rows
    [gain] = [
        row.cells[1]
        for row in methods_exhibit(whole).tables[0].rows
        if row.label == "16-best 4-gram"
    ]
    assert gain.interval == pytest.approx((8.3, 21.7))


@pytest.mark.parametrize("width", [80, 140])
def test_printed_tables_have_all_numbers_and_fit(report, width):
    out = io.StringIO()
    print_table(report, Console(file=out, width=width))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for method in report.methods:
        assert method.label.split()[0] in text
        assert f"{method.block_efficiency:.2f}" in text
        assert f" {method.serial_calls} " in text
    normalised = " ".join(text.split())
    figures = [f"{f.name} {f.value} {f.note}".rstrip() for f in key_figures(report)]
    about = [report.title, report.task, report.device, "layers 4", report.notes[0]]
    assert all(expected in normalised for expected in figures + about)


def test_differing_texts_have_a_table(report):
    assert "divergence" not in {table.name for table in methods_exhibit(report).tables}
    divergence = {"rate": 0.25, "first": 7, "gap": 0.0312}
    report = with_changed_method(report, "bpd", divergence=divergence, differing=1)
    assert rows_of(report)["divergence", "BPD"] == ["1", "4", "7", "0.0312"]


def test_charts_of_losses():
    rows = [
        {"step": 10, "loss": 8.0, "loss_head_1": 3.0, "loss_head_2": 5.0, "rate": 0.1},
        {"step": 20, "loss": math.nan, "loss_head_1": 2.0, "loss_head_2": 4.0},
        {"step": 30, "loss": 5.0, "validation_loss": 6.0, "validation_loss_head_1": 2},
    ]
    heads, validation, total = loss_charts(rows)
    assert [(s.label, s.x, s.y, s.dashed) for s in total.series] == [
        ("training", [10, 30], [8, 5], False),
        ("validation", [30], [6], True),
    ]
    assert [series.label for series in heads.series] == ["head 1", "head 2"]
    assert [(s.label, s.dashed) for s in validation.series] == [("head 1", False)]
    assert loss_charts([{"step": 1}]) == []
    [long] = loss_charts([{"step": n, "loss": 1 / (n + 1)} for n in range(10_001)])
    assert len(long.series[0].x) <= 200


def test_page_contains_tables_definitions_settings_and_drafts(report):
    page = page_of(report)
    text = Parsed(render(page)).text
    for (_, label), cells in rows_of(report).items():
        assert label in text
        assert all(cell in text for cell in cells)
    for sentence in [*DEFINITIONS, *DEFINITIONS.values(), *report.notes]:
        assert sentence in text
    for facts in (report.model, report.settings, report.versions):
        assert formatting.fact(facts) in text
    # Every method except greedy decoding, which does not draft.
    assert [len(prompt.traces) for prompt in page.texts] == [3] * 2
    assert "The lattice of one block" in text


def test_the_explorer_steps_through_the_records(report):
    record = dataclasses.replace(
        report.records[1],
        steps=[Step(["a", "b", "x"], 2), Step(["c", "a"], 1, rank=3)],
    )
    other_record = dataclasses.replace(
        report.records[2], steps=[Step(["a", "b"], 2), Step(["d"], 1)]
    )
    report = dataclasses.replace(report, records=[record, other_record])
    first, second = page_of(report).texts
    assert (first.key, second.key) == ("prompt/1", "prompt/1/ngram_p")
    assert [first.pieces[token] for token in first.output] == ["a", "b", "c"]
    calls = first.traces[0]["calls"]
    assert [(c["at"], c["accepted"], c["rank"]) for c in calls] == [
        (0, 2, 0),
        (2, 1, 3),
    ]
    assert [first.pieces[token] for token in calls[1]["winner"]] == ["c", "a"]
    assert calls[1]["draft"] == []  # only the winner of a call is recorded
    assert [second.pieces[token] for token in second.output] == ["a", "b", "d"]
