"""An exhibit's tables as CSV: measured values, intervals and the paper's values."""

from bpd_jax.reporting.exhibits import Cell, Table

_PARTS = ("", " low", " high", " paper", " text")


def table_csv(table: Table) -> str:
    """Returns a table as CSV, with one line per row and a header.

    Every column is expanded to up to five: the value in full precision, `… low` and
    `… high` of its interval, `… paper` and `… text`; those that are empty in every row
    are left out.
    """
    import pandas as pd

    columns = []
    for number, column in enumerate(table.columns):
        label = f"{column.group} {column.label}".strip()
        unit = column.unit.removeprefix("+")
        label += f" ({unit})" if unit else ""
        cells = [_parts(row.cells[number]) for row in table.rows]
        for index, part in enumerate(_PARTS):
            entries = [entry[index] for entry in cells]
            if not part or any(entry not in (None, "") for entry in entries):
                columns.append(pd.Series(entries, name=label + part, dtype=object))
    labels = pd.Series(
        [row.label for row in table.rows], name=table.heading, dtype=object
    )
    frame = pd.concat([labels, *columns], axis="columns")
    return frame.to_csv(index=False, lineterminator="\n")


def _parts(cell: Cell) -> tuple[float | str | None, ...]:
    low, high = (None, None) if cell.interval is None else cell.interval
    return cell.value, low, high, cell.paper, cell.text
