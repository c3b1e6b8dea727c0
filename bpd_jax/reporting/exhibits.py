"""Exhibits: tables and charts of measured values and those printed in the paper.

An `Exhibit` is computed from records and independent of its presentation as a page,
LaTeX or CSV.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bpd_jax.reporting.records import Facts, LatticePicture

LINES, POINTS, BARS = "lines", "points", "bars"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of a table.

    Attributes:
      value: the measured value; None if there is none.
      paper: the paper's value, in the same unit; None if there is none.
      interval: (low, high) of the value.
      text: text instead of a value, or after it.
      tone: `good`, `warn` or `bad`, which sets its colour; "" for none.
    """

    value: float | None = None
    paper: float | None = None
    interval: tuple[float, float] | None = None
    text: str = ""
    tone: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
      label: its heading.
      group: heading above the labels, shared by neighbouring columns of one group.
      digits: decimal places of values.
      unit: written after values, such as `%` or `ms`; `+%` writes a sign as well.
    """

    label: str
    group: str = ""
    digits: int = 2
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table; `strong` emphasises a summary."""

    label: str
    cells: list[Cell]
    strong: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      name: name of its files, such as `table4`.
      title: heading above it.
      heading: heading of the column of row labels.
      columns, rows: every row has a cell for every column.
      caption: sentences below it.
      intervals: description of the intervals of its cells.
    """

    name: str
    title: str
    heading: str
    columns: list[Column]
    rows: list[Row]
    caption: str = ""
    intervals: str = "95 % bootstrap interval over examples"

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(
                    f"row {row.label!r} of {self.name} has {len(row.cells)} cells for "
                    f"{len(self.columns)} columns"
                )


@dataclasses.dataclass(frozen=True)
class Series:
    """One line, cloud of points or set of bars.

    Attributes:
      label: label in the legend.
      x, y: coordinates; for bars, `x` is the index of the category, from 0.
      low, high: intervals of `y`, or empty.
      names: names of single points, or empty.
      dashed: whether it is dashed, for values that were not measured: the paper's
        values, a fitted line.
    """

    label: str
    x: list[float]
    y: list[float]
    low: list[float] = dataclasses.field(default_factory=list)
    high: list[float] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    dashed: bool = False


def line_of(
    label: str,
    points: Mapping[Any, Cell] | Mapping[Any, float],
    *,
    dashed: bool = False,
) -> Series:
    """A line through points; with a band if the points are cells with intervals."""
    cells = {
        float(x): y if isinstance(y, Cell) else Cell(float(y))
        for x, y in points.items()
    }
    values = {x: cell.value for x, cell in cells.items() if cell.value is not None}
    bounds: list[tuple[float, float]] = []
    if any(cell.interval for cell in cells.values()):
        # A single example has no interval.
        bounds = [cells[x].interval or (y, y) for x, y in values.items()]
    return Series(
        label,
        list(values),
        list(values.values()),
        [low for low, _ in bounds],
        [high for _, high in bounds],
        dashed=dashed,
    )


@dataclasses.dataclass(frozen=True)
class Chart:
    """One panel of a figure.

    Attributes:
      name: name of its files, such as `figure6_squad`.
      title: heading above it.
      kind: `LINES`, `POINTS` or `BARS`.
      x_label, y_label: labels of the axes.
      series: lines, clouds of points or sets of bars.
      categories: names along the axis of bars.
      logarithmic: whether the x axis is logarithmic.
    """

    name: str
    title: str
    kind: str
    x_label: str
    y_label: str
    series: list[Series]
    categories: list[str] = dataclasses.field(default_factory=list)
    logarithmic: bool = False


@dataclasses.dataclass(frozen=True)
class Finding:
    """A statement of the paper, and whether the measurements confirm it.

    Attributes:
      statement: the statement, paraphrased.
      holds: whether it holds; None if inconclusive.
      evidence: sentences with the measured numbers.
    """

    statement: str
    holds: bool | None
    evidence: str


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """One study: the tables and figures that it regenerates.

    Attributes:
      name: name of the study and its folder, such as `table4`.
      title: title of its section.
      paper: the corresponding tables and figures of the paper.
      question: the question of the study, in one or two sentences.
      tables, charts, lattices, findings: its contents.
      notes: sentences about definitions and differences from the paper.
      facts: named facts of the run: command, date, device, versions, model.
    """

    name: str
    title: str
    paper: str
    question: str
    tables: list[Table] = dataclasses.field(default_factory=list)
    charts: list[Chart] = dataclasses.field(default_factory=list)
    lattices: list[LatticePicture] = dataclasses.field(default_factory=list)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    facts: Facts = dataclasses.field(default_factory=dict)

    @property
    def remarks(self) -> list[str]:
        """The notes, followed by the contenders left out, each with the reason."""
        left_out = self.facts.get("left_out") or {}
        return self.notes + [
            f"Left out: {name}: {reason}" for name, reason in left_out.items()
        ]
