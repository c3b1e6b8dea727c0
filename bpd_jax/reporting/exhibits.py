"""What a table or figure of the paper becomes: numbers of ours beside those printed.

An `Exhibit` is drawn from records and knows nothing of how it is shown; pages, LaTeX
and CSV are made of it.
"""

import dataclasses

from bpd_jax.reporting.records import Facts, LatticePicture, Record

LINES, POINTS, BARS = CHART_KINDS = ("lines", "points", "bars")


@dataclasses.dataclass(frozen=True)
class Cell(Record):
    """One entry of a table.

    Attributes:
      value: what was measured; None if it was not.
      paper: what the paper prints there, in the same unit; None if nothing.
      interval: (low, high) of the value.
      text: words in place of a value, or after it.
      tone: `good`, `warn` or `bad`, for its colour; "" for none.
    """

    value: float | None = None
    paper: float | None = None
    interval: tuple[float, float] | None = None
    text: str = ""
    tone: str = ""


@dataclasses.dataclass(frozen=True)
class Column(Record):
    """One column of a table.

    Attributes:
      label: its heading.
      group: a heading above it that it shares with its neighbours of the same group.
      digits: decimal places of values.
      unit: written after values, such as `%` or `ms`; `+%` writes a sign as well.
    """

    label: str
    group: str = ""
    digits: int = 2
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """One row of a table; `strong` sets a summary apart."""

    label: str
    cells: list[Cell]
    strong: bool = False


@dataclasses.dataclass(frozen=True)
class Table(Record):
    """A table.

    Attributes:
      name: of its files, such as `table4`.
      title: heading above it.
      heading: of the column of row labels.
      columns, rows: every row has a cell for every column.
      caption: sentences below it.
      intervals: what the intervals of its cells are.
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
class Series(Record):
    """One line, cloud of points or set of bars.

    Attributes:
      label: in the legend.
      x, y: of equal length; of bars, `x` counts the categories from 0.
      low, high: intervals of `y`, or empty.
      names: of single points, or empty.
      dashed: set apart from what was measured: the paper's values, a fitted line.
    """

    label: str
    x: list[float]
    y: list[float]
    low: list[float] = dataclasses.field(default_factory=list)
    high: list[float] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    dashed: bool = False

    def __post_init__(self) -> None:
        for values in (self.y, self.low, self.high, self.names):
            if values and len(values) != len(self.x):
                raise ValueError(f"{self.label!r} has {len(self.x)} points, not all")


@dataclasses.dataclass(frozen=True)
class Chart(Record):
    """One panel of a figure.

    Attributes:
      name: of its files, such as `figure6_squad`.
      title: heading above it.
      kind: one of `CHART_KINDS`.
      x_label, y_label: of the axes.
      series: what is drawn.
      categories: names along the axis of bars.
      logarithmic: whether the x axis is.
    """

    name: str
    title: str
    kind: str
    x_label: str
    y_label: str
    series: list[Series]
    categories: list[str] = dataclasses.field(default_factory=list)
    logarithmic: bool = False

    def __post_init__(self) -> None:
        if self.kind not in CHART_KINDS:
            raise ValueError(f"{self.name} is of the unknown kind {self.kind!r}")


@dataclasses.dataclass(frozen=True)
class Finding(Record):
    """A statement of the paper, and whether what was measured bears it out.

    Attributes:
      statement: the paper's, in our words.
      holds: None where it cannot be told.
      evidence: the numbers, in a sentence.
    """

    statement: str
    holds: bool | None
    evidence: str


@dataclasses.dataclass(frozen=True)
class Exhibit(Record):
    """One study: the tables and figures that it regenerates.

    Attributes:
      name: of the study and its folder, such as `table4`.
      title: of its section.
      paper: which tables and figures of the paper these are, above its title.
      question: what it asks, in a sentence or two.
      tables, charts, lattices, findings: what it shows.
      notes: sentences that the reader should know: what differs from the paper.
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
        """The notes, then which contenders the run left out, each with the reason."""
        left_out = self.facts.get("left_out") or {}
        return self.notes + [
            f"Left out: {name}: {reason}" for name, reason in left_out.items()
        ]
