"""Builders of tables, charts and findings, shared by all studies."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.evaluation.efficiency import gain_interval, ratio_interval
from bpd_jax.evaluation.statistics import FEWEST, Fit, exceeds
from bpd_jax.reporting.cell_text import number
from bpd_jax.reporting.exhibits import Cell, Column, Finding, Row, Table

ALL = None
"""All tasks together, in place of a task."""

MISSING = "not measured"

Key = Any
"""The key of a row, such as the name of a task."""

Entry = tuple[Column, Callable[[Key], Cell]]
"""A column, and its cell in each row."""

Sums = tuple[np.ndarray, np.ndarray]
"""Tokens, and serial calls or times, of every example, `[n]` each."""

Judgement = tuple[bool | None, str]
"""Whether a statement holds, None if inconclusive, and the evidence."""


def counted(count: int, noun: str) -> str:
    """Returns a number with a noun in the singular or plural.

    >>> counted(1, "task"), counted(2016, "win")
    ('1 task', '2,016 wins')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def decimal(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """Formats a number as in tables: with a minus sign and thousands separators.

    >>> decimal(-0.821), decimal(1128.44, 1, sign=True)
    ('−0.82', '+1,128.4')
    """
    return number(value, Column("", digits=digits), sign=sign)


def correlation(fit: Fit) -> str:
    """Formats a rank correlation with its p-value."""
    return f"{decimal(fit.rank_correlation)} (p = {fit.p_value:.2g})"


def with_interval(
    cell: Cell, digits: int = 1, unit: str = " %", *, sign: bool = True
) -> str:
    """Formats a value with its interval, if it has one.

    >>> with_interval(Cell(20.0, interval=(-1.0, 41.0)))
    '+20.0 % (−1.0 … +41.0)'
    """
    assert cell.value is not None
    text = f"{decimal(cell.value, digits, sign=sign)}{unit}"
    if cell.interval is None:
        return text
    low, high = (decimal(end, digits, sign=sign) for end in cell.interval)
    return f"{text} ({low} … {high})"


def verdict(cell: Cell, examples: int, no_gain: float = 0.0) -> bool | None:
    """Whether a gain is significantly positive; False if it is negative.

    Args:
      cell: the gain with its interval.
      examples: number of examples; with fewer than `FEWEST` the result is None.
      no_gain: the value without a gain.
    """
    if cell.interval is None or examples < FEWEST:
        return None
    return exceeds(cell.interval, no_gain)


def finding(
    statement: str,
) -> Callable[[Callable[[Any], Judgement | str]], Callable[[Any], Finding]]:
    """Decorates a function that judges a statement, so that it returns a `Finding`.

    The function returns the verdict with the evidence, or only the evidence if it is
    inconclusive.
    """

    def decorate(judge: Callable[[Any], Judgement | str]) -> Callable[[Any], Finding]:
        return lambda data: judged(statement, judge(data))

    return decorate


def judged(statement: str, judgement: Judgement | str) -> Finding:
    """Creates the finding of a statement; see `finding`."""
    if isinstance(judgement, str):
        judgement = None, judgement
    return Finding(statement, *judgement)


def missing_cell(paper: float | None = None, text: str = MISSING) -> Cell:
    """A cell without a measured value."""
    return Cell(paper=paper, text=text)


def cell(
    value: float | None,
    paper: float | None = None,
    *,
    scale: float = 1.0,
    text: str = MISSING,
) -> Cell:
    """A cell with `scale * value`; if the value is None, with `text`."""
    if value is None:
        return missing_cell(paper, text)
    return Cell(scale * value, paper)


def _ratio(sums: Sums) -> float:
    numerators, denominators = sums
    return float(numerators.sum()) / float(denominators.sum())


def ratio_cell(sums: Sums, paper: float | None = None) -> Cell:
    """The ratio of two sums with its bootstrap interval over examples."""
    numerators, denominators = sums
    if not len(numerators):
        return missing_cell(paper)
    value = _ratio(sums)
    if len(numerators) == 1:
        return Cell(value, paper)
    return Cell(value, paper, ratio_interval(numerators, denominators))


def gain_cell(sums: Sums, base: Sums, paper: float | None = None) -> Cell:
    """Gain of a ratio over another in percent, with its paired bootstrap interval.

    Both are sums of the same examples, in the same order.
    """
    if not len(sums[0]) or not len(base[0]):
        return missing_cell(paper)
    ratio = _ratio(sums) / _ratio(base)
    gain = 100 * (ratio - 1)
    if len(sums[0]) == 1:
        return Cell(gain, paper)
    low, high = gain_interval(*sums, *base)
    return Cell(gain, paper, (100 * low, 100 * high))


def by_row(
    columns: Sequence[Column], cells: Callable[[Key], Sequence[Cell]]
) -> list[Entry]:
    """Columns whose cells one function computes for each row."""
    cached = functools.cache(cells)

    def entry(index: int, key: Key) -> Cell:
        return cached(key)[index]

    return [(c, functools.partial(entry, index)) for index, c in enumerate(columns)]


def table(
    name: str,
    title: str,
    heading: str,
    rows: Mapping[Key, str],
    columns: Sequence[Entry],
    caption: str = "",
    **fields: Any,
) -> Table:
    """A table with a cell for each pair of a row and a column.

    Args:
      name, title, heading, caption: as in `Table`.
      rows: labels by key; the row of `ALL` is a summary.
      columns: columns, each with a function from a key to its cell.
      **fields: further fields of `Table`.
    """
    cells = {key: [entry(key) for _, entry in columns] for key in rows}
    return Table(
        name,
        title,
        heading,
        [column for column, _ in columns],
        [Row(label, cells[key], strong=key is ALL) for key, label in rows.items()],
        caption,
        **fields,
    )
