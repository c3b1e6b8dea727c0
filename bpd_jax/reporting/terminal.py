"""The report in a terminal or a log file."""

import sys
from collections.abc import Iterable
from typing import TypeVar

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bpd_jax.reporting import wording
from bpd_jax.reporting.records import DecodeRecord, Report, Step

T = TypeVar("T")

# A log file has no width of its own.
_LOG_WIDTH = 100
_STYLES = {"identical": "green", "near-tie": "yellow", "different": "bold red"}


def print_table(report: Report, console: Console | None = None) -> None:
    """Prints the methods and their drafts as tables, the result in words below.

    Args:
      report: what was measured.
      console: where to print; standard output by default, 100 columns without
        colour if that is no terminal.
    """
    console = console or standard_output()
    console.print(Text(report.title, style="bold"))
    for name, value in _header(report).items():
        console.print(Text.assemble((f"{name:<7}", "dim"), value))
    console.print(_method_table(report, wide=console.width >= _LOG_WIDTH))
    if wording.drafted(report):
        console.print(_draft_table(report))
        console.print(Text(wording.DRAFT_CAPTION, style="dim"))
    console.print(Text(wording.summary_sentence(report)))
    for sentence in wording.divergence_sentences(report):
        console.print(Text(sentence))
    for note in report.notes:
        console.print(Text(f"Note: {note}", style="dim"))


def print_steps(
    record: DecodeRecord, console: Console | None = None, *, limit: int = 12
) -> None:
    """Prints the drafts of one decoded prompt, one line per serial call.

    Accepted tokens are green, the first of them bold because it is certain, and
    rejected ones are red and struck through; a `✗` before the first rejected token
    says the same without colour.

    Args:
      record: the prompt and method to show.
      console: as for `print_table`.
      limit: number of serial calls to show.
    """
    console = console or standard_output()
    console.print(
        Text.assemble(
            (f"{record.method}, prompt {record.prompt_index + 1}", "bold"),
            f": {len(record.output_ids)} tokens in {record.serial_calls} serial "
            f"calls, block efficiency {record.block_efficiency:.2f}",
        )
    )
    for number, step in enumerate(record.steps[:limit], start=1):
        console.print(
            _step_line(number, step), no_wrap=True, overflow="ellipsis", crop=True
        )
    if (hidden := len(record.steps) - limit) > 0:
        console.print(Text(f"      … and {hidden} more serial calls", style="dim"))


def print_stream(
    pieces: Iterable[tuple[str, bool, T | None]], console: Console | None = None
) -> T | None:
    """Prints a text as it is decoded, with the tokens marked that cost no call.

    Each call decodes one certain token; accepted draft tokens after it are green, or
    in brackets where there is no colour.

    Args:
      pieces: texts, whether each is to be marked, and at last what belongs to all.
      console: as for `print_table`.

    Returns:
      The last third element that is not None.
    """
    console = console or standard_output()
    colour = console.color_system is not None and not console.no_color
    found = None
    for piece, marked, last in pieces:
        found = found if last is None else last
        bare = piece.strip()
        if not marked or not bare:
            text = Text(piece)
        elif colour:
            text = Text(piece, style="bold green")
        else:
            before, _, after = piece.partition(bare)
            text = Text(f"{before}[{bare}]{after}")
        console.print(text, end="", soft_wrap=True, highlight=False)
        console.file.flush()
    console.print()
    return found


def standard_output() -> Console:
    """A console on standard output; without colour if that is no terminal."""
    if sys.stdout.isatty():
        return Console()
    return Console(width=_LOG_WIDTH, color_system=None)


def _header(report: Report) -> dict[str, str]:
    model = ", ".join(f"{name} {wording.fact(v)}" for name, v in report.model.items())
    return {
        name: value
        for name, value in [
            ("model", model),
            ("task", report.task),
            ("device", report.device),
        ]
        if value
    }


def _method_table(report: Report, *, wide: bool) -> Table:
    """One row per method; intervals get a column if `wide`, else a second line."""
    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("Method")
    headings = ["Block\nefficiency", "Gain\nover BPD", "Serial\ncalls", "Tokens"]
    headings += ["Wall\ntime (s)", "Speed-\nup"]
    if wide:
        headings.insert(1, "Bootstrap\ninterval")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("Output", no_wrap=True)
    best, fastest = wording.best_method(report), wording.fastest_method(report)
    for method in report.methods:
        efficiency, interval = (
            f"{method.block_efficiency:.2f}",
            wording.interval(method),
        )
        table.add_row(
            Text(wording.labelled(method)),
            *(
                [efficiency, interval]
                if wide
                else [f"{efficiency}\n{interval}".strip()]
            ),
            wording.percent(method.gain),
            f"{method.serial_calls:,}",
            f"{method.tokens:,}",
            wording.seconds(method.seconds),
            Text(wording.speedup(method), style="bold cyan" * (method is fastest)),
            Text(wording.verdict(method), style=_STYLES[method.agreement]),
            style="bold" if method is best else "dim" if method.upper_bound else "",
        )
    return table


def _draft_table(report: Report) -> Table:
    """What the drafts of each method look like."""
    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("Drafts")
    for heading in wording.DRAFT_HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    best = wording.best_method(report)
    for method in wording.drafted(report):
        style = "bold" if method is best else "dim" if method.upper_bound else ""
        table.add_row(Text(method.label), *wording.draft_figures(method), style=style)
    return table


def _step_line(number: int, step: Step) -> Text:
    """Returns `  3  2/4  x = ✗ y z` with the tokens in colour."""
    line = Text(f"{number:>4}  {step.accepted}/{len(step.draft)}  ", style="")
    for index, piece in enumerate(step.draft):
        # Spaces would run together with those between the tokens.
        token = wording.visible(piece).replace(" ", "·") or "∅"
        if index == step.accepted:
            line.append("✗ ", style="red")
        if index >= step.accepted:
            style = "red strike"
        else:
            style = "bold green" if index == 0 else "green"
        line.append(token, style=style)
        line.append(" ")
    if step.rank:
        line.append(f"(draft {step.rank + 1})", style="dim")
    return line
