"""Prints exhibits to a terminal or a log file."""

import dataclasses
import itertools

import rich.box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from bpd_jax.reporting.cell_text import interval, measured, printed
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Table
from bpd_jax.reporting.terminal import standard_output

# Longer labels of rows are wrapped before a table is split.
_LABEL_WIDTH = 36
_MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "yellow")}
_TONES = {"good": "green", "warn": "yellow", "bad": "bold red"}


def print_exhibit(
    exhibit: Exhibit, console: Console | None = None, *, intervals: bool = False
) -> None:
    """Prints tables with the paper's numbers in brackets, then findings and notes.

    Args:
      console: output; by default `standard_output()`.
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
    text = Text(measured(cell, column), style=_TONES.get(cell.tone, ""))
    if intervals and (bounds := interval(cell, column)):
        text.append(f"\n{bounds}", style="dim")
    if cell.paper is not None:
        text.append(f" ({printed(cell, column)})", style="dim")
    return text
