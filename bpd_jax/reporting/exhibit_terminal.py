"""An exhibit in a terminal: its tables, and what of the paper's statements holds."""

import rich.box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from bpd_jax.reporting import numbers
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Table
from bpd_jax.reporting.terminal import standard_output

_MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "yellow")}


def print_exhibit(exhibit: Exhibit, console: Console | None = None) -> None:
    """Prints tables with the paper's numbers in brackets, then findings and notes.

    Args:
      exhibit: what to print.
      console: where; standard output by default.
    """
    console = console or standard_output()
    console.print(Text(exhibit.title, style="bold"))
    for table in exhibit.tables:
        console.print(_table(table))
    for finding in exhibit.findings:
        mark, style = _MARKS[finding.holds]
        console.print(
            Text.assemble(
                (f"{mark} ", style), f"{finding.statement} {finding.evidence}"
            )
        )
    for note in exhibit.remarks:
        console.print(Text(f"Note: {note}", style="dim"))


def _table(table: Table) -> RichTable:
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
        drawn.add_column(heading, justify="right")
    for row in table.rows:
        cells = [
            _cell(cell, column)
            for cell, column in zip(row.cells, table.columns, strict=True)
        ]
        drawn.add_row(Text(row.label), *cells, style="bold" if row.strong else "")
    return drawn


def _cell(cell: Cell, column: Column) -> Text:
    """The value, the paper's in brackets."""
    shown = Text(numbers.measured(cell, column))
    if cell.paper is not None:
        shown.append(f" ({numbers.printed(cell, column)})", style="dim")
    return shown
