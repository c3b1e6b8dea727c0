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
        assert wording.speedup(method) in text
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


PIECES = [
    ("The", False, None),
    (" sky is", True, None),
    (" blue", False, None),
    ("", True, None),
    (".", False, "end"),
]


def stream_to(**settings):
    buffer = io.StringIO()
    last = terminal.print_stream(iter(PIECES), Console(file=buffer, **settings))
    assert last == "end"
    return buffer.getvalue()


def test_accepted_tokens_are_in_brackets_without_colour(monkeypatch):
    assert stream_to(width=9) == "The [sky is] blue.\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "The [sky is] blue." in stream_to(force_terminal=True)


def test_accepted_tokens_are_green_in_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = stream_to(force_terminal=True, color_system="standard")
    assert text == "The\x1b[1;32m sky is\x1b[0m blue.\n"


def test_the_fastest_method_is_named(report):
    oracle_aside = [m for m in report.methods if not m.upper_bound]
    best = max(oracle_aside, key=lambda method: method.speedup)
    sentence = wording.fastest_sentence(report)
    assert best.label in sentence
    assert f"{best.speedup:.2f} times as fast" in sentence
    slow = [dataclasses.replace(m, speedup=0.5) for m in report.methods[1:]]
    greedy = dataclasses.replace(report.methods[0], speedup=1.0)
    slow = dataclasses.replace(report, methods=[greedy, *slow], records=[])
    sentence = wording.fastest_sentence(slow)
    assert "plain greedy decoding; " in sentence
    assert "0.50 times" in sentence


def test_the_choice_of_auto_is_marked(report):
    chosen = dataclasses.replace(report.methods[1], automatic=True)
    report = dataclasses.replace(report, methods=[chosen], records=[])
    assert f"{chosen.label} ← auto" in printed(terminal.print_table, report)


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
