"""Records of a run as tables need them: by contender, task and example.

Contenders are compared on the examples that all of them were recorded on, so that a
run that was stopped early is compared fairly.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.decoding.methods import Method
from bpd_jax.evaluation.efficiency import gain_interval, ratio_interval
from bpd_jax.reporting.exhibits import Cell, Column, Row, Series, Table
from bpd_jax.reporting.numbers import number
from bpd_jax.studies.config import parse_contender
from bpd_jax.studies.printed import TASKS, Numbers
from bpd_jax.studies.records import REPORT, DraftRecord, call_positions, from_digits
from bpd_jax.studies.run_files import StudyRun

ALL = None
"""In the place of a task: all of them together."""

MISSING = "not measured"


def counted(count: int, noun: str) -> str:
    """Returns a number of things.

    >>> counted(1, "task"), counted(2016, "win")
    ('1 task', '2,016 wins')

    Args:
      count: how many.
      noun: in the singular; its plural has one more s.
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def decimal(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """Returns a number as tables show it: with a real minus and with thousands.

    >>> decimal(-0.821), decimal(1128.44, 1, sign=True)
    ('−0.82', '+1,128.4')

    Args:
      value: the number.
      digits: decimal places.
      sign: whether a positive value gets one.
    """
    return number(value, Column("", digits=digits), sign=sign)


def tasks_of(run: StudyRun) -> list[str]:
    """The tasks of a run, in the order of its configuration."""
    return list(run.facts.get("tasks", {}))


def task_name(run: StudyRun, task: str | None, everything: str = "all") -> str:
    """What people read in place of a task, or of all of them."""
    return everything if task is ALL else run.task_label(task)


def contenders_of(run: StudyRun) -> list[str]:
    """The contenders with records of drafts, in the order of the configuration."""
    found = dict.fromkeys(record.contender for record in run.of(DraftRecord))
    named = [name for name in run.facts.get("labels", {}) if name in found]
    return list(dict.fromkeys([*named, *found]))


def oracle_of(run: StudyRun) -> str | None:
    """The recorded oracle that bounds the others: of all heads, the widest.

    A width that is not written is the lattice's, which no other exceeds.
    """
    oracles = [
        contender
        for contender in map(parse_contender, contenders_of(run))
        if contender.method.is_oracle and contender.method.setting("heads") is None
    ]
    widest = max(
        oracles, key=lambda c: c.method.setting("k") or float("inf"), default=None
    )
    return None if widest is None else widest.name


def drafts_from_lattice(method: Method) -> bool:
    """Whether all that a method drafts lies in the heads' lattice, which bounds it."""
    return method.within_lattice and not method.is_oracle


def drafts_of(
    run: StudyRun, contender: str, task: str | None = ALL, part: str = REPORT
) -> list[DraftRecord]:
    """What one contender drafted, in the order of tasks and examples.

    Args:
      run: of a study.
      contender: its name.
      task: one task, or `ALL`.
      part: of the examples.
    """
    order = {name: index for index, name in enumerate(tasks_of(run))}
    found = [
        record
        for record in run.drafts.get(contender, [])
        if record.part == part and task in (ALL, record.task)
    ]
    return sorted(found, key=lambda r: (order.get(r.task, len(order)), r.example))


def paired(
    run: StudyRun,
    contenders: Sequence[str],
    task: str | None = ALL,
    part: str = REPORT,
) -> list[list[DraftRecord]]:
    """What contenders drafted on the examples that all of them were recorded on.

    Args:
      run: of a study, perhaps stopped before its end.
      contenders: their names.
      task: one task, or `ALL`.
      part: of the examples.

    Returns:
      One list per contender, all in the same order.
    """
    found = [drafts_of(run, name, task, part) for name in contenders]
    keys = [{(record.task, record.example) for record in one} for one in found]
    common = set.intersection(*keys) if keys else set()
    return [
        [record for record in one if (record.task, record.example) in common]
        for one in found
    ]


def sums(records: Sequence[DraftRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and serial calls of every example."""
    tokens = np.array([record.tokens for record in records], int)
    return tokens, np.array([record.calls for record in records], int)


def efficiency(records: Sequence[DraftRecord]) -> float | None:
    """Block efficiency over some examples; None of none."""
    tokens, calls = sums(records)
    return float(tokens.sum() / calls.sum()) if len(records) else None


def by_task(run: StudyRun, contender: str) -> dict[str, float]:
    """Block efficiency of a contender on every task that it was measured on."""
    found = {
        task: efficiency(drafts_of(run, contender, task)) for task in tasks_of(run)
    }
    return {task: value for task, value in found.items() if value is not None}


def checked_tokens(records: Sequence[DraftRecord]) -> float:
    """Draft tokens that a serial call checks, the mean over the calls of decoding."""
    return sum(r.nodes for r in records) / sum(r.calls for r in records)


def repetition_of(
    records: Sequence[DraftRecord],
) -> tuple[float | None, float | None]:
    """Share of equal neighbours and mean longest run in the drafts of decoding.

    As `bpd_jax.evaluation.statistics.repetition` has them (paper section 6.1): over the
    calls that decoding makes, of drafts of two tokens and more.
    """
    pairs = equal = drafts = longest = 0
    for record in records:
        calls = call_positions(from_digits(record.accepted))
        length = from_digits(record.length)[calls]
        equal += int(from_digits(record.equal)[calls].sum())
        pairs += int((length - 1).sum())
        longest += int(from_digits(record.longest)[calls][length > 1].sum())
        drafts += int((length > 1).sum())
    return (equal / pairs, longest / drafts) if pairs else (None, None)


def missing_cell(paper: float | None = None, text: str = MISSING) -> Cell:
    """A cell without a value of ours."""
    return Cell(paper=paper, text=text)


def cell(
    value: float | None,
    paper: float | None = None,
    *,
    scale: float = 1.0,
    text: str = MISSING,
) -> Cell:
    """A cell of a value, times `scale`; of None, one with a text."""
    if value is None:
        return missing_cell(paper, text)
    return Cell(scale * value, paper)


def ratio_cell(
    numerators: np.ndarray, denominators: np.ndarray, paper: float | None = None
) -> Cell:
    """Σ numerators / Σ denominators with its bootstrap interval over examples."""
    if not len(numerators):
        return missing_cell(paper)
    value = float(numerators.sum() / denominators.sum())
    if len(numerators) == 1:
        return Cell(value, paper)
    return Cell(value, paper, ratio_interval(numerators, denominators))


def efficiency_cell(records: Sequence[DraftRecord], paper: float | None = None) -> Cell:
    """Block efficiency with its bootstrap interval over examples."""
    return ratio_cell(*sums(records), paper)


def gain_cell(
    records: Sequence[DraftRecord],
    base: Sequence[DraftRecord],
    paper: float | None = None,
) -> Cell:
    """Gain in block efficiency over `base` in percent, with its paired interval.

    Both hold the same examples, in the same order.
    """
    return gain_of_sums(sums(records), sums(base), paper)


def gain_of_sums(
    mine: tuple[np.ndarray, np.ndarray],
    base: tuple[np.ndarray, np.ndarray],
    paper: float | None = None,
) -> Cell:
    """As `gain_cell`, from tokens and serial calls of every example."""
    if not len(mine[0]) or not len(base[0]):
        return missing_cell(paper)
    ratio = (mine[0].sum() / mine[1].sum()) / (base[0].sum() / base[1].sum())
    gain = 100 * (float(ratio) - 1)
    if len(mine[0]) == 1:
        return Cell(gain, paper)
    low, high = gain_interval(*mine, *base)
    return Cell(gain, paper, (100 * low, 100 * high))


def paper_value(
    run: StudyRun, numbers: Numbers, contender: str, task: str | None
) -> float | None:
    """What the paper prints of a task beside a contender, if anything.

    Of all tasks together it is the mean of the paper's seven, where all were run.
    """
    column = run.facts.get("printed", {}).get(contender)
    if task is not ALL:
        return numbers.get(task, {}).get(column)
    found = [numbers.get(name, {}).get(column) for name in tasks_of(run)]
    values = [value for value in found if value is not None]
    return sum(values) / len(values) if len(values) == len(TASKS) else None


def task_rows(
    run: StudyRun,
    cells: Callable[[str | None], list[Cell]],
    everything: str = "all",
) -> list[Row]:
    """A row for every task, and one for all of several."""
    tasks = tasks_of(run)
    rows = [Row(run.task_label(task), cells(task)) for task in tasks]
    return rows + [Row(everything, cells(ALL), strong=True)] * (len(tasks) > 1)


def task_table(
    run: StudyRun,
    name: str,
    title: str,
    columns: Sequence[tuple[Column, Callable[[str | None], Cell]]],
    caption: str = "",
) -> Table:
    """Tasks in rows; every column has a function from a task, or `ALL`, to its cell."""
    return Table(
        name,
        title,
        "task",
        [column for column, _ in columns],
        task_rows(run, lambda task: [entry(task) for _, entry in columns]),
        caption,
    )


def line_of(
    label: str,
    points: Mapping[Any, Cell] | Mapping[Any, float],
    *,
    dashed: bool = False,
) -> Series:
    """A line through points; of cells with intervals, with its band."""
    cells = {
        float(x): y if isinstance(y, Cell) else Cell(float(y))
        for x, y in points.items()
    }
    values = {x: found.value for x, found in cells.items() if found.value is not None}
    bounds: list[tuple[float, float]] = []
    if any(found.interval for found in cells.values()):
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
