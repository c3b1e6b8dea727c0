"""The table and the drafts as text, with and without colour."""

import dataclasses
import io

import pytest
from rich.console import Console

from bpd_jax.reporting import terminal, wording
from bpd_jax.reporting.records import Step


def printed(function, *arguments, width=100, **keywords):
    """What `function` prints on a console of that width without colour."""
    buffer = io.StringIO()
    function(*arguments, Console(file=buffer, width=width), **keywords)
    return buffer.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_table_has_every_number_and_fits(report, width):
    text = printed(terminal.print_table, report, width=width)
    assert max(map(len, text.splitlines())) <= width
    for method in report.methods:
        assert method.label.split()[0] in text
        assert f"{method.block_efficiency:.2f}" in text
        assert wording.interval(method) in text
        assert wording.percent(method.gain) in text
        assert f" {method.serial_calls} " in text
        assert wording.seconds(method.seconds) in text
    assert "identical ✓" in text
    assert wording.summary_sentence(report) in " ".join(text.split())


@pytest.mark.parametrize("width", [80, 100])
def test_drafts_have_a_table_of_their_own(report, width):
    text = printed(terminal.print_table, report, width=width)
    head, _, drafts = text.partition("Drafts")
    assert "neighbours" in drafts
    assert "neighbours" not in head
    for method in report.methods[1:]:
        rows = [line for line in drafts.splitlines() if method.label.split()[0] in line]
        for figure in wording.draft_figures(method):
            assert any(figure in row for row in rows)
    assert "Greedy" not in drafts


def test_texts_that_differ_are_told_in_a_sentence(report):
    parted = {"rate": 0.25, "first": 7, "gap": 0.0312}
    methods = report.methods[1:2]
    methods = [dataclasses.replace(m, divergence=parted, differing=1) for m in methods]
    methods = [*report.methods[:1], *methods]
    report = dataclasses.replace(report, methods=methods, records=[])
    text = " ".join(printed(terminal.print_table, report).split())
    assert (
        "BPD: 1 of 4 texts differ from greedy decoding, the earliest at token "
        "7; where they part, the lower of the two tokens' logits is 0.031 below the "
        "model's best (median)."
    ) in text


def test_table_names_model_task_and_device(report):
    text = printed(terminal.print_table, report)
    for words in (report.title, report.task, report.device, "layers 4", *report.notes):
        assert words in text


def test_different_outputs_are_red(report):
    wrong = dataclasses.replace(report.methods[1], differing=2)
    report = dataclasses.replace(report, methods=[wrong], records=[])
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=100, force_terminal=True, color_system="standard"
    )
    terminal.print_table(report, console)
    assert "\x1b[1;31m2 DIFFERENT" in buffer.getvalue()


def test_a_log_gets_no_colour_codes(report, capsys):
    terminal.print_table(report)
    terminal.print_steps(report.records[-1])
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) <= 100


def record_of(report, *steps):
    return dataclasses.replace(report.records[1], steps=list(steps))


def test_steps_show_acceptance_without_colour(report):
    record = record_of(report, Step(["\n    ", "return", " x", "y"], 2, rank=3))
    lines = printed(terminal.print_steps, record).splitlines()
    assert lines[1].strip() == "1  2/4  ⏎···· return ✗ ·x y (draft 4)"


def test_steps_show_acceptance_in_colour(report):
    record = record_of(report, Step(["a", "b", "c"], 2))
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=80, force_terminal=True, color_system="standard"
    )
    terminal.print_steps(record, console)
    line = buffer.getvalue().splitlines()[1]
    assert "\x1b[1;32ma" in line
    assert "\x1b[32mb" in line
    assert "\x1b[9;31mc" in line


def test_steps_are_one_line_each_and_limited(report):
    long = Step(["word" * 10] * 8, 3)
    record = record_of(report, *[long] * 9)
    lines = printed(terminal.print_steps, record, width=80, limit=4).splitlines()
    assert len(lines) == 1 + 4 + 1
    assert "5 more serial calls" in lines[-1]
    assert max(map(len, lines)) <= 80


def test_markup_in_tokens_is_text(report):
    record = record_of(report, Step(["[red]", "[/]", "\x1b[0m"], 3))
    text = printed(terminal.print_steps, record)
    assert "[red] [/] \\x1b[0m" in text
