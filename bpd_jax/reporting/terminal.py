"""Prints exhibits, tables, drafts and streamed text to a terminal or a log file."""

import dataclasses
import itertools
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

import rich.box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from bpd_jax.reporting import formatting
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Table
from bpd_jax.reporting.records import DecodeRecord, Step

T = TypeVar("T")

# Columns of output that is not a terminal.
_LOG_WIDTH = 100
# Longer labels of rows are wrapped before a table is split.
_LABEL_WIDTH = 36
_MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "yellow")}
_TONES = {"good": "green", "warn": "yellow", "bad": "bold red"}


def print_exhibit(
    exhibit: Exhibit, console: Console | None = None, *, intervals: bool = False
) -> None:
    """Prints tables with the paper's numbers in brackets, then findings and notes.

    Args:
      exhibit: the exhibit.
      console: output; by default standard output, with 100 columns and without colour
        if it is not a terminal.
      intervals: whether to print intervals.
    """
    console = console or standard_output()
    console.print(Text(exhibit.title, style="bold"))
    for table in exhibit.tables:
        for part in _parts(table, console.width, intervals):
            console.print(_table(part, intervals))
    for finding in exhibit.findings:
        mark, style = _MARKS[finding.holds]
        console.print(
            Text.assemble(
                (f"{mark} ", style), f"{finding.statement} {finding.evidence}"
            )
        )
    for note in exhibit.remarks:
        console.print(Text(f"Note: {note}", style="dim"))


def _parts(table: Table, width: int, intervals: bool) -> list[Table]:
    """Splits a table that is too wide for the terminal, between groups of columns."""
    groups = itertools.groupby(
        range(len(table.columns)), lambda index: table.columns[index].group or index
    )
    parts: list[list[int]] = [[]]
    for _, group in groups:
        columns = list(group)
        wider = [*parts[-1], *columns]
        if parts[-1] and _width(_select(table, wider), intervals) > width:
            parts.append(columns)
        else:
            parts[-1] = wider
    if len(parts) == 1:
        return [table]
    return [
        dataclasses.replace(
            _select(table, columns),
            title=f"{table.title} ({number} of {len(parts)})",
            caption=table.caption if number == len(parts) else "",
        )
        for number, columns in enumerate(parts, start=1)
    ]


def _select(table: Table, columns: list[int]) -> Table:
    rows = [
        dataclasses.replace(row, cells=[row.cells[index] for index in columns])
        for row in table.rows
    ]
    return dataclasses.replace(
        table, columns=[table.columns[index] for index in columns], rows=rows
    )


def _width(table: Table, intervals: bool) -> int:
    """The width at which lines wrap between words, but no word is broken."""
    widths = [max([0, *(min(len(row.label), _LABEL_WIDTH) for row in table.rows)])]
    for index, column in enumerate(table.columns):
        cells = [_cell(row.cells[index], column, intervals) for row in table.rows]
        texts = [column.group, column.label, *(cell.plain for cell in cells)]
        words = [word for text in texts for word in text.split()]
        widths.append(max(map(len, words), default=0))
    return 2 + sum(width + 1 for width in widths)


def _table(table: Table, intervals: bool) -> RichTable:
    drawn = RichTable(
        title=table.title,
        title_justify="left",
        caption=table.caption or None,
        caption_justify="left",
        box=rich.box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    drawn.add_column(table.heading)
    for column in table.columns:
        heading = f"{column.group}\n{column.label}" if column.group else column.label
        if intervals:  # Intervals are below the values, which requires narrow columns.
            heading = heading.replace(" ", "\n", 1)
        drawn.add_column(heading, justify="right")
    for row in table.rows:
        cells = [
            _cell(cell, column, intervals)
            for cell, column in zip(row.cells, table.columns, strict=True)
        ]
        drawn.add_row(Text(row.label), *cells, style="bold" if row.strong else "")
    return drawn


def _cell(cell: Cell, column: Column, intervals: bool) -> Text:
    """The value, its interval on a line below, the paper's value in brackets."""
    text = Text(formatting.measured(cell, column), style=_TONES.get(cell.tone, ""))
    if intervals and (bounds := formatting.interval(cell, column)):
        text.append(f"\n{bounds}", style="dim")
    if cell.paper is not None:
        text.append(f" ({formatting.printed(cell, column)})", style="dim")
    return text


def print_rows(
    headings: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    *,
    title: str = "",
    caption: str = "",
    left: int = 1,
    strong: Collection[str] = (),
    frame: bool = True,
    console: Console | None = None,
) -> None:
    """Prints a table of texts.

    Args:
      headings: headings of the columns.
      rows: the cells of every row, or None for a line between rows.
      title: text above the table.
      caption: text below the table.
      left: number of columns that are aligned left, counted from the first; the others
        are aligned right.
      strong: first cells of the rows that are bold.
      frame: whether lines separate the columns and surround the table.
      console: as for `print_exhibit`.
    """
    drawn = RichTable(
        title=title or None,
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
        box=rich.box.HEAVY_HEAD if frame else rich.box.SIMPLE_HEAD,
    )
    for index, heading in enumerate(headings):
        drawn.add_column(heading, justify="left" if index < left else "right")
    for row in rows:
        if row is None:
            drawn.add_section()
        else:
            drawn.add_row(*map(Text, row), style="bold" if row[0] in strong else "")
    (console or standard_output()).print(drawn)


def print_steps(
    record: DecodeRecord, console: Console | None = None, *, limit: int = 12
) -> None:
    """Prints the drafts of one decoded prompt, one line per serial call.

    Accepted tokens are green, the first one, which is certain, in bold. Rejected tokens
    are red and struck through; a `✗` before the first one marks them without colour.

    Args:
      record: the prompt and method to print.
      console: as for `print_exhibit`.
      limit: maximum number of serial calls.
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
    """Prints a text as it is decoded, and marks accepted draft tokens.

    Each serial call decodes one certain token; the accepted draft tokens after it are
    green, or in brackets without colour.

    Args:
      pieces: for every piece its text, whether it is marked, and a result or None.
      console: as for `print_exhibit`.

    Returns:
      The last result that is not None.
    """
    console = console or standard_output()
    colour = console.color_system is not None and not console.no_color
    result = None
    for piece, marked, piece_result in pieces:
        result = result if piece_result is None else piece_result
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
    return result


def standard_output() -> Console:
    """A console on standard output; without colour if that is not a terminal."""
    if sys.stdout.isatty():
        return Console()
    return Console(width=_LOG_WIDTH, color_system=None)


def _step_line(number: int, step: Step) -> Text:
    """Returns `  3  2/4  x = ✗ y z` with the tokens in colour."""
    line = Text(f"{number:>4}  {step.accepted}/{len(step.draft)}  ", style="")
    for index, piece in enumerate(step.draft):
        # Spaces within tokens are distinguished from those between tokens.
        token = formatting.visible(piece).replace(" ", "·") or "∅"
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
