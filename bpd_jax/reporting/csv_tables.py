"""An exhibit's tables as CSV: measured values, intervals and the paper's values."""

import csv
import io

from bpd_jax.reporting.exhibits import Cell, Table

_PARTS = ("", " low", " high", " paper", " text")


def table_csv(table: Table) -> str:
    """Returns a table as CSV, with one line per row and a header.

    Every column is expanded to up to five: the value in full precision, `… low` and
    `… high` of its interval, `… paper` and `… text`; those that are empty in every row
    are left out.
    """
    names = [table.heading]
    lines = [[row.label] for row in table.rows]
    for number, column in enumerate(table.columns):
        label = f"{column.group} {column.label}".strip()
        unit = column.unit.removeprefix("+")
        label += f" ({unit})" if unit else ""
        entries = [_parts(row.cells[number]) for row in table.rows]
        for index, part in enumerate(_PARTS):
            if index == 0 or any(entry[index] for entry in entries):
                names.append(label + part)
                for line, entry in zip(lines, entries, strict=True):
                    line.append(entry[index])
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerows([names, *lines])
    return stream.getvalue()


def _parts(cell: Cell) -> list[str]:
    low, high = (None, None) if cell.interval is None else cell.interval
    values = (cell.value, low, high, cell.paper)
    return [*("" if value is None else repr(value) for value in values), cell.text]
