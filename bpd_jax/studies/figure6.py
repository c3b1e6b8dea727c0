"""Figure 6: what the lattice holds, by candidates and by heads."""

import numpy as np

from bpd_jax.evaluation.entropy import fit_line
from bpd_jax.reporting.exhibits import (
    Cell,
    Chart,
    Column,
    Exhibit,
    Finding,
    Row,
    Table,
)
from bpd_jax.studies import printed
from bpd_jax.studies.config import BPD, parse_contender
from bpd_jax.studies.records import REPORT, DraftRecord, OracleRecord
from bpd_jax.studies.results import (
    contenders_of,
    counted,
    drafts_from_lattice,
    line_of,
    missing_cell,
    ratio_cell,
    task_name,
    tasks_of,
)
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import DRAFTS, ORACLE, Study

WIDTHS = (1, 2, 4, 8, 16)
"""Columns of the table, as far as so many candidates were recorded."""

NOTES = [
    "The oracle drafts the longest prefix of the text that lies in the lattice. At no "
    "position can a draft from the same lattice yield more. Whole texts may still take "
    "a call less now and then, because a shorter step can end in a luckier place.",
    "The paper's values are those of its Tables 4 and 9 for 1 (BPD), 2 and 16 "
    "candidates of nine heads.",
]


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws a panel for every task, and one for all together."""
    tasks: list[str | None] = [*tasks_of(run), None]
    grids = {task: found for task in tasks if (found := _records(run, task))}
    return study.show(
        run,
        tables=[_widths_table(run, grids), *_heads_table(run, grids)],
        charts=[_chart(run, task, found) for task, found in grids.items()],
        findings=[
            _one_is_bpd(run),
            _grows(run, grids),
            _falling_returns(grids),
            _weak_gain_most(grids),
            _more_heads(run, grids),
            _bounds_all(run),
        ],
        notes=NOTES,
    )


Grids = dict[str | None, list[OracleRecord]]


def _records(run: StudyRun, task: str | None) -> list[OracleRecord]:
    return [
        record
        for record in run.of(OracleRecord)
        if record.part == REPORT and task in (None, record.task)
    ]


def _sums(records: list[OracleRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[n]`, and calls `[n, L - 1, K]`."""
    tokens = np.array([record.tokens for record in records])
    return tokens, np.array([record.calls for record in records])


def efficiencies(records: list[OracleRecord]) -> np.ndarray:
    """Block efficiency, `[L - 1, K]`: of heads 2 … h, and k candidates of each."""
    tokens, calls = _sums(records)
    ratios: np.ndarray = tokens.sum() / calls.sum(0)
    return ratios


def _widths_table(run: StudyRun, grids: Grids) -> Table:
    most = max((len(found[0].calls[0]) for found in grids.values()), default=WIDTHS[-1])
    widths = [width for width in WIDTHS if width <= most]
    rows = []
    for task in [*tasks_of(run), None]:
        paper = printed.TABLE4.get(task or "", {})
        by_width = {1: "bpd", 2: "oracle2", 16: "oracle16"}
        values = [paper.get(by_width.get(width, "")) for width in widths]
        found = grids.get(task)
        if found is None:
            cells = [*map(missing_cell, values), missing_cell()]
        else:
            tokens, calls = _sums(found)
            cells = [
                ratio_cell(tokens, calls[:, -1, width - 1], value)
                for width, value in zip(widths, values, strict=True)
            ]
            best = efficiencies(found)[-1]
            cells.append(Cell(100 * float(best[widths[-1] - 1] / best[0] - 1)))
        rows.append(Row(task_name(run, task, "All"), cells, strong=task is None))
    columns = [Column(f"k = {width}", "tokens per call") for width in widths]
    headroom = Column(f"k = {widths[-1]} over BPD", digits=1, unit="+%")
    return Table(
        "figure6",
        "The oracle with all heads, by candidates of each",
        "task",
        [*columns, headroom],
        rows,
        "With one candidate the oracle is BPD.",
    )


def _heads_table(run: StudyRun, grids: Grids) -> list[Table]:
    """The widest lattice by the number of heads."""
    if not grids:
        return []
    heads = len(next(iter(grids.values()))[0].calls)
    width = len(next(iter(grids.values()))[0].calls[0])
    rows = [
        Row(
            task_name(run, task, "All"),
            [Cell(float(value)) for value in efficiencies(found)[:, -1]],
            strong=task is None,
        )
        for task, found in grids.items()
    ]
    columns = [Column(f"{h} heads", "tokens per call") for h in range(2, heads + 2)]
    title = f"The oracle with {width} candidates, by heads"
    return [Table("figure6_heads", title, "task", columns, rows)]


def _chart(run: StudyRun, task: str | None, records: list[OracleRecord]) -> Chart:
    grid = efficiencies(records)
    return Chart(
        f"figure6_{task or 'all'}",
        f"Oracle: {task_name(run, task, 'all tasks')}",
        "lines",
        "candidates k of each head",
        "tokens per call",
        [
            line_of(f"{heads} heads", dict(enumerate(row, start=1)))
            for heads, row in enumerate(grid, start=2)
        ],
    )


def _drafts(run: StudyRun) -> list[tuple[DraftRecord, OracleRecord]]:
    """Drafts with the oracle's record of the same example."""
    oracle = {(r.task, r.example): r for r in _records(run, None)}
    return [
        (record, oracle[record.task, record.example])
        for record in run.of(DraftRecord)
        if record.part == REPORT and (record.task, record.example) in oracle
    ]


def _one_is_bpd(run: StudyRun) -> Finding:
    statement = "With one candidate the oracle takes BPD's calls, text by text."
    pairs = [(a, b) for a, b in _drafts(run) if a.contender == BPD]
    if not pairs:
        return Finding(statement, None, "BPD was not recorded beside the oracle.")
    same = sum(draft.calls == oracle.calls[-1][0] for draft, oracle in pairs)
    return Finding(
        statement, same == len(pairs), f"The same on {same} of {len(pairs)} texts."
    )


def _grows(run: StudyRun, grids: Grids) -> Finding:
    statement = "The oracle's block efficiency grows with every further candidate."
    tasks = [task for task in grids if task]
    if not tasks:
        return Finding(statement, None, "Not measured.")
    falls = [
        run.task_label(task)
        for task in tasks
        if (np.diff(efficiencies(grids[task])[-1]) < 0).any()
    ]
    evidence = f"It never falls on {len(tasks) - len(falls)} of {len(tasks)} tasks"
    listed = f", and does on {', '.join(falls)}" if falls else ""
    return Finding(statement, not falls, f"{evidence}{listed}.")


def _falling_returns(grids: Grids) -> Finding:
    statement = "Further candidates add less and less."
    if None not in grids or len(line := efficiencies(grids[None])[-1]) < 3:
        return Finding(statement, None, "Not measured.")
    middle = (len(line) + 1) // 2
    early = (line[middle - 1] - line[0]) / (middle - 1)
    late = (line[-1] - line[middle - 1]) / (len(line) - middle)
    return Finding(
        statement,
        bool(late < early),
        f"Over all tasks {early:+.3f} tokens per call for each of the candidates 2 to "
        f"{middle}, {late:+.3f} for each of those after.",
    )


def _weak_gain_most(grids: Grids) -> Finding:
    statement = "The less BPD accepts on a task, the more of it is there to be gained."
    lines = [efficiencies(found)[-1] for task, found in grids.items() if task]
    gains = [float(line[-1] / line[0] - 1) for line in lines]
    fit = fit_line([float(line[0]) for line in lines], gains)
    if fit is None:
        return Finding(statement, None, "Too few tasks.")
    return Finding(
        statement,
        fit.falls(),
        f"Rank correlation of the oracle's relative gain with BPD's block efficiency: "
        f"{fit.rank_correlation:.2f} (p = {fit.p_value:.2g}) over {len(lines)} tasks, "
        "with gains from "
        f"{100 * min(gains):.0f} to {100 * max(gains):.0f} %. In the paper from 18 to "
        "54 %.",
    )


def _more_heads(run: StudyRun, grids: Grids) -> Finding:
    statement = "More heads help up to a point."
    if None not in grids or len(grids[None][0].calls) < 2:
        return Finding(statement, None, "Not measured.")
    column = efficiencies(grids[None])[:, -1]
    first, last = column[1] - column[0], column[-1] - column[-2]
    return Finding(
        statement,
        bool(column[-1] > column[0] and (len(column) < 3 or last < first)),
        f"Over all tasks the third head adds {first:+.3f} tokens per call to the "
        f"widest oracle, head {len(column) + 1} {last:+.3f}.",
    )


def _bounds_all(run: StudyRun) -> Finding:
    statement = "The oracle bounds every draft from the same lattice."
    pairs = [(a, b) for a, b in _drafts(run) if _is_bounded(a.contender, b)]
    # With one candidate the oracle is BPD, so BPD says nothing.
    names = [
        name
        for name in contenders_of(run)
        if name != BPD and any(a.contender == name for a, _ in pairs)
    ]
    if not names:
        return Finding(statement, None, "No refined draft was recorded beside it.")
    calls: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for draft, oracle in pairs:
        if draft.contender != BPD:
            key = draft.contender, draft.task
            calls.setdefault(key, []).append((draft.calls, oracle.calls[-1][-1]))
    gaps = {
        (name, task): sum(a for a, _ in mine) / sum(b for _, b in mine)
        for name in names
        for task in tasks_of(run)
        if (mine := calls.get((name, task)))
    }
    name, task = min(gaps, key=gaps.__getitem__)
    return Finding(
        statement,
        gaps[name, task] >= 1,
        f"Of {counted(len(names), 'method')} on each task, {run.label(name)} on "
        f"{run.task_label(task)} comes nearest: it takes {gaps[name, task]:.2f} times "
        "the oracle's calls.",
    )


def _is_bounded(contender: str, oracle: OracleRecord) -> bool:
    method = parse_contender(contender).method
    return drafts_from_lattice(method) and (method.setting("k") or 0) <= len(
        oracle.calls[0]
    )


STUDY = Study(
    "figure6",
    "The oracle",
    "Figure 6",
    "How many tokens would a call yield if the best path through the heads' lattice "
    "were always found, by candidates and by heads?",
    present,
    measures=(ORACLE, DRAFTS),
)
