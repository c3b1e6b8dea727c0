"""Tables of block efficiency: tasks in rows, contenders in columns."""

from collections.abc import Callable, Mapping, Sequence

from bpd_jax.evaluation.efficiency import headroom_taken
from bpd_jax.evaluation.significance import efficiency_test, holm
from bpd_jax.reporting.exhibits import Cell, Column, Row, Table
from bpd_jax.studies.config import BPD
from bpd_jax.studies.pairing import oracle_of, paired
from bpd_jax.studies.printed import TASKS, Numbers
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.summary import (
    drafts_of,
    efficiency,
    efficiency_cell,
    gain_cell,
    sums,
    tasks_of,
)

ALL = None
"""In the place of a task: all of them together."""

MISSING = Cell(text="not measured")


def rows_of_tasks(
    run: StudyRun, cells: Callable[[str | None], list[Cell]]
) -> list[Row]:
    """A row for every task, and one for all of them."""
    tasks = tasks_of(run)
    rows = [Row(run.task_label(task), cells(task)) for task in tasks]
    if len(tasks) > 1:
        rows.append(Row("all", cells(ALL), strong=True))
    return rows


def columns_of(run: StudyRun, contenders: Sequence[str]) -> list[Column]:
    """A column for every contender."""
    return [Column(run.label(name)) for name in contenders]


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


def efficiency_table(
    run: StudyRun,
    name: str,
    contenders: Sequence[str],
    numbers: Mapping[str, dict[str, float]],
    title: str = "Block efficiency: tokens per serial call",
) -> Table:
    """Block efficiency with bootstrap intervals over examples."""

    def cells(task: str | None) -> list[Cell]:
        return [
            efficiency_cell(
                drafts_of(run, contender, task),
                paper_value(run, dict(numbers), contender, task),
            )
            for contender in contenders
        ]

    whole = [paper_value(run, dict(numbers), name, ALL) for name in contenders]
    caption = (
        "In the last row our value is over all texts, the paper's the mean of its "
        "seven tasks."
    )
    return Table(
        name,
        title,
        "task",
        columns_of(run, contenders),
        rows_of_tasks(run, cells),
        caption if any(value is not None for value in whole) else "",
    )


def gain_table(
    run: StudyRun,
    name: str,
    contenders: Sequence[str],
    numbers: Mapping[str, dict[str, float]],
) -> Table:
    """Gain over BPD in percent with paired intervals; a star where p < 0.05."""
    refined = [contender for contender in contenders if contender != BPD]

    def cells(task: str | None) -> list[Cell]:
        found = []
        pairs = {name: paired(run, [name, BPD], task) for name in refined}
        # The oracle is no contender: that it gains is no question.
        tested = [n for n in refined if pairs[n][0] and not n.startswith("oracle")]
        p_values = holm(
            [efficiency_test(*sums(pairs[n][0]), *sums(pairs[n][1])) for n in tested]
        )
        stars = {n: "*" for n, p in zip(tested, p_values, strict=True) if p < 0.05}
        for contender, (mine, base) in pairs.items():
            theirs = paper_value(run, dict(numbers), contender, task)
            plain = paper_value(run, dict(numbers), BPD, task)
            paper = 100 * (theirs / plain - 1) if theirs and plain else None
            if not mine:
                found.append(Cell(paper=paper, text=MISSING.text))
                continue
            cell = gain_cell(mine, base, paper)
            star = stars.get(contender, "")
            found.append(Cell(cell.value, cell.paper, cell.interval, star))
        return found

    columns = [Column(run.label(name), digits=1, unit="+%") for name in refined]
    return Table(
        name,
        "Gain in block efficiency over BPD",
        "task",
        columns,
        rows_of_tasks(run, cells),
        "Paired bootstrap intervals over examples. * p < 0.05 in a paired permutation "
        "test, after Holm's correction for the contenders of a row.",
    )


def headroom_table(run: StudyRun, name: str, contenders: Sequence[str]) -> list[Table]:
    """Share of the oracle's headroom taken; nothing without an oracle."""
    oracle = oracle_of(run)
    others = [c for c in contenders if c != BPD and not c.startswith("oracle")]
    if oracle is None or not others:
        return []

    def cells(task: str | None) -> list[Cell]:
        found = []
        for contender in others:
            records = paired(run, [contender, BPD, oracle], task)
            mine, base, best = map(efficiency, records)
            share = None
            if mine is not None and base is not None and best is not None:
                share = headroom_taken(mine, base, best)
            words = MISSING.text if mine is None else "no headroom"
            found.append(Cell(text=words) if share is None else Cell(100 * share))
        return found

    columns = [Column(run.label(c), digits=0, unit="%") for c in others]
    return [
        Table(
            name,
            "Share of the oracle's headroom taken",
            "task",
            columns,
            rows_of_tasks(run, cells),
            f"(BE - BE of BPD) / (BE of {run.label(oracle)} - BE of BPD). Trees and "
            "drafts beyond the oracle's k can pass it.",
        )
    ]


def by_task(run: StudyRun, contender: str) -> dict[str, float]:
    """Block efficiency of a contender on every task that it was measured on."""
    found = {
        task: efficiency(drafts_of(run, contender, task)) for task in tasks_of(run)
    }
    return {task: value for task, value in found.items() if value is not None}
