"""Exhibits and drafts as text, with and without colour."""

import dataclasses
import io
import os
import re
import sys

import pytest
from rich.console import Console

from bpd_jax.base import cli
from bpd_jax.reporting import terminal, terminal_tables
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Finding, Row, Table
from bpd_jax.reporting.records import Step


def printed(function, shown, width=100):
    buffer = io.StringIO()
    function(shown, console=Console(file=buffer, width=width))
    return buffer.getvalue()


def test_numbers_findings_and_notes_are_printed():
    columns = [Column("BPD"), Column("gain", digits=1, unit="+%")]
    rows = [
        Row("SQuAD", [Cell(1.236, 2.08), Cell(18.44, text="*")]),
        Row("QA", [Cell(text="not measured"), Cell(-0.5)], strong=True),
    ]
    exhibit = Exhibit(
        "table4",
        "Block efficiency",
        "Table 4",
        "How much?",
        tables=[Table("table4", "Tokens per call", "task", columns, rows, "Ours.")],
        findings=[
            Finding("It falls.", False, "On none."),
            Finding("It stays.", None, "Too few."),
        ],
        notes=["Not the paper's model."],
        facts={"left_out": {"neural:1": "there is no such model."}},
    )
    out = printed(terminal_tables.print_exhibit, exhibit)
    lines = [line.rstrip() for line in out.splitlines()]
    (squad,) = [line for line in lines if line.startswith(" SQuAD")]
    assert squad.split() == ["SQuAD", "1.24", "(2.08)", "+18.4", "%", "*"]
    (qa,) = [line for line in lines if line.startswith(" QA")]
    assert qa.split() == ["QA", "not", "measured", "−0.5", "%"]
    assert "✗ It falls. On none." in lines
    assert "? It stays. Too few." in lines
    assert "Note: Not the paper's model." in lines
    assert "Note: Left out: neural:1: there is no such model." in lines


def test_wide_tables_are_split_between_groups():
    groups = [f"Task {number}" for number in range(5)]
    columns = [
        Column(label, group) for group in groups for label in ("Calls", "Speed-up")
    ]
    cells = [Cell(1 + number / 100) for number in range(10)]
    table = Table("t", "Speeds", "Method", columns, [Row("Tree", cells)], "Caption.")
    exhibit = Exhibit("t", "Speeds", "Table", "?", tables=[table])
    show = terminal_tables.print_exhibit
    wide, narrow = (printed(show, exhibit, w) for w in (200, 50))
    assert "(1 of" not in wide
    assert wide.count("Tree") == 1
    rows = [line.split() for line in narrow.splitlines() if line.startswith(" Tree")]
    assert "Speeds (1 of 3)" in narrow
    assert narrow.count("Caption.") == 1
    values = [f"{cell.value:.2f}" for cell in cells]
    assert rows == [["Tree", *part] for part in (values[:4], values[4:8], values[8:])]


def test_rows_are_aligned_and_bold(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    buffer = io.StringIO()
    terminal.print_rows(
        ["order", "text", "kept"],
        [["[1]", "20", "3"], None, ["all", "1,000", ":up:"]],
        title="counts",
        strong=["all"],
        console=Console(file=buffer, force_terminal=True, color_system="standard"),
    )
    text = buffer.getvalue()
    assert "\x1b[1mall" in text
    assert "\x1b[1m[1]" not in text
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    assert lines == [
        "counts",
        "┏━━━━━━━┳━━━━━━━┳━━━━━━┓",
        "┃ order ┃  text ┃ kept ┃",
        "┡━━━━━━━╇━━━━━━━╇━━━━━━┩",
        "│ [1]   │    20 │    3 │",
        "├───────┼───────┼──────┤",
        "│ all   │ 1,000 │ :up: │",
        "└───────┴───────┴──────┘",
    ]


PIECES = [
    ("The", False, None),
    (" sky is", True, None),
    (" blue", False, None),
    ("", True, None),
    (".", False, "end"),
]


def test_accepted_tokens_are_green_in_a_terminal_and_else_in_brackets(monkeypatch):
    def stream_to(**settings):
        buffer = io.StringIO()
        last = terminal.print_stream(iter(PIECES), Console(file=buffer, **settings))
        assert last == "end"
        return buffer.getvalue()

    assert stream_to(width=9) == "The [sky is] blue.\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "The [sky is] blue." in stream_to(force_terminal=True)
    monkeypatch.delenv("NO_COLOR")
    text = stream_to(force_terminal=True, color_system="standard")
    assert text == "The\x1b[1;32m sky is\x1b[0m blue.\n"


ODD = "all:\tcc\r\n\fq\v\b\x1b]52;c;\x07 \x9b2J\rx"


def test_a_file_gets_the_text_itself_and_a_terminal_shows_what_it_would_obey():
    buffer = io.StringIO()
    terminal.write(ODD, Console(file=buffer, width=9))
    assert buffer.getvalue() == ODD
    buffer = io.StringIO()
    terminal.write(ODD, Console(file=buffer, width=9, force_terminal=True), "dim")
    text = re.sub(r"\x1b\[[0-9;]*m", "", buffer.getvalue())
    assert text == ("all:\tcc\n\\x0cq\\x0b\\x08\\x1b]52;c;\\x07 \\x9b2J\\rx")


def test_tables_show_control_characters(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    terminal.print_rows(["name"], [["\x1b]0;\x9b2J"]])
    assert "│ \\x1b]0;\\x9b2J │" in sys.stdout.getvalue()


@pytest.mark.parametrize(
    "show", [lambda c: c.print("text"), lambda c: terminal.write("text" * 9999, c)]
)
def test_a_closed_pipe_is_no_error_of_the_command(show, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as exit_info, cli.exit_on_errors():
            show(terminal.standard_output())
        monkeypatch.undo()
    assert exit_info.value.code == 141


def test_steps_show_acceptance_without_colour(report):
    steps = [
        Step(["\n    ", "return", " x", "y"], 2, rank=3),
        Step(["[red]", "[/]", "\x1b[0m"], 3),  # markup and control characters
    ]
    record = dataclasses.replace(report.records[1], steps=steps)
    _, *lines = printed(terminal.print_steps, record).splitlines()
    assert [line.strip() for line in lines] == [
        "1  2/4  ⏎···· return ✗ ·x y (draft 4)",
        "2  3/3  [red] [/] \\x1b[0m",
    ]
