"""Formats the cells of tables, for pages, LaTeX and terminals."""

import math

from bpd_jax.reporting.exhibits import Cell, Column, Table
from bpd_jax.reporting.formatting import MISSING


def number(value: float, column: Column, *, sign: bool = False) -> str:
    """Returns a value with the column's decimal places, without its unit.

    >>> number(-0.004, Column("gain")), number(1234.5, Column("ms", digits=1))
    ('0.00', '1,234.5')

    Args:
      column: column of the value.
      sign: whether a positive value has a sign; with a unit `+…` it always has.
    """
    text = f"{abs(value):,.{column.digits}f}"
    if not any(digit in text for digit in "123456789"):
        return text
    if value < 0:
        return f"−{text}"
    return f"+{text}" if sign or column.unit.startswith("+") else text


def measured(cell: Cell, column: Column) -> str:
    """Returns the measured value with its unit; its text or a dash without a value.

    >>> measured(Cell(12.34), Column("gain", digits=1, unit="+%"))
    '+12.3 %'
    """
    if cell.value is None or not math.isfinite(cell.value):
        return cell.text or MISSING
    unit = column.unit.removeprefix("+")
    text = number(cell.value, column) + (f" {unit}" if unit else "")
    return f"{text} {cell.text}" if cell.text else text


def interval(cell: Cell, column: Column) -> str:
    """Returns the interval of a value; empty without one.

    >>> interval(Cell(1.5, interval=(1.4, 1.6)), Column("efficiency"))
    '1.40–1.60'
    """
    if cell.value is None or cell.interval is None:
        return ""
    low, high = (number(bound, column) for bound in cell.interval)
    # Between numbers with signs, a dash could be read as another sign.
    return f"{low} … {high}" if "−" in low + high or "+" in low else f"{low}–{high}"


def printed(cell: Cell, column: Column) -> str:
    """Returns the paper's value; empty if it prints none."""
    return "" if cell.paper is None else number(cell.paper, column)


def has_intervals(table: Table) -> bool:
    """Whether any entry has an interval."""
    return any(
        cell.value is not None and cell.interval is not None
        for row in table.rows
        for cell in row.cells
    )


def has_printed(table: Table) -> bool:
    """Whether the paper prints any of the entries."""
    return any(cell.paper is not None for row in table.rows for cell in row.cells)


def columns_of_words(table: Table, longer_than: int = 0) -> list[bool]:
    """Whether each column contains only text, neither measured nor printed values.

    Args:
      longer_than: number of characters that a cell of such a column must exceed.
    """
    return [
        all(cell.value is None and cell.paper is None for cell in cells)
        and any(len(cell.text) > longer_than for cell in cells)
        for number in range(len(table.columns))
        for cells in [[row.cells[number] for row in table.rows]]
    ]


def groups(table: Table) -> list[tuple[str, int]]:
    """Headings of groups of columns: text, and number of columns.

    The list is empty if no column has a group.
    """
    spans: list[tuple[str, int]] = []
    for column in table.columns:
        if spans and spans[-1][0] == column.group:
            spans[-1] = (column.group, spans[-1][1] + 1)
        else:
            spans.append((column.group, 1))
    return spans if any(group for group, _ in spans) else []
