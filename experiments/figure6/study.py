"""Figure 6: the oracle by number of candidates and of heads."""

import collections
import dataclasses

import numpy as np

from bpd_jax.reporting.exhibits import (
    LINES,
    Cell,
    Chart,
    Column,
    Finding,
    Table,
    line_of,
)
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import DRAFTS, ORACLE, Study
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.study_records import REPORT, OracleRecord
from bpd_jax.studies.tables import (
    ALL,
    Judgement,
    by_row,
    counted,
    finding,
    missing_cell,
    ratio_cell,
    table,
)
from experiments import printed
from experiments.claim_measures import weak_headroom
from experiments.comparisons import trend_finding
from experiments.refinements import is_bounded, method_of

WIDTHS = (1, 2, 4, 8, 16)
"""Columns of the table, up to the number of recorded candidates."""
_PRINTED = {1: "bpd", 2: "oracle2", 16: "oracle16"}
"""Widths with a column of the paper's Table 4."""


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The oracle on n texts.

    Attributes:
      tokens: decoded tokens, `[n]`.
      calls: serial calls, `[n, L - 1, K]`, with heads 2 … h and k candidates of each.
    """

    tokens: np.ndarray
    calls: np.ndarray

    @property
    def efficiencies(self) -> np.ndarray:
        """Block efficiency, `[L - 1, K]`."""
        ratios: np.ndarray = self.tokens.sum() / self.calls.sum(0)
        return ratios


@dataclasses.dataclass(frozen=True)
class _Oracle:
    """The oracle's records of a run, by measured task and `ALL`."""

    run: StudyRun
    grids: dict[str | None, _Grid]

    @property
    def tasks(self) -> dict[str, np.ndarray]:
        """Block efficiency with all heads by number of candidates, `[K]`, by task."""
        return {t: grid.efficiencies[-1] for t, grid in self.grids.items() if t}


def _records(run: StudyRun) -> dict[tuple[str, int], OracleRecord]:
    """The reported records, by task and example."""
    records = [r for r in run.of(OracleRecord) if r.part == REPORT]
    return {(record.task, record.example): record for record in records}


def _prepare(run: StudyRun) -> _Oracle:
    grids = {}
    for task in [*run.tasks, ALL]:
        records = [r for r in _records(run).values() if task in (ALL, r.task)]
        if records:
            grids[task] = _Grid(
                np.array([record.tokens for record in records]),
                np.array([record.calls for record in records]),
            )
    return _Oracle(run, grids)


def _widths_table(data: _Oracle) -> Table:
    most = max((g.calls.shape[-1] for g in data.grids.values()), default=WIDTHS[-1])
    widths = [width for width in WIDTHS if width <= most]

    def cells(task: str | None) -> list[Cell]:
        paper = printed.TABLE4.get(task or "", {})
        values = [paper.get(_PRINTED.get(width, "")) for width in widths]
        grid = data.grids.get(task)
        if grid is None:
            return [*map(missing_cell, values), missing_cell()]
        row = [
            ratio_cell((grid.tokens, grid.calls[:, -1, width - 1]), value)
            for width, value in zip(widths, values, strict=True)
        ]
        best = grid.efficiencies[-1]
        return [*row, Cell(100 * float(best[widths[-1] - 1] / best[0] - 1))]

    columns = [Column(f"k = {width}", "tokens per call") for width in widths]
    columns.append(Column(f"k = {widths[-1]} over BPD", digits=1, unit="+%"))
    return table(
        "figure6",
        "The oracle with all heads, by number of candidates",
        "task",
        data.run.rows(),
        by_row(columns, cells),
        "With one candidate the oracle is BPD.",
    )


def _heads_table(data: _Oracle) -> list[Table]:
    """The widest lattice by the number of heads."""
    if not data.grids:
        return []
    _, heads, width = next(iter(data.grids.values())).calls.shape
    rows = {t: label for t, label in data.run.rows().items() if t in data.grids}
    columns = by_row(
        [Column(f"{h} heads", "tokens per call") for h in range(2, heads + 2)],
        lambda task: [Cell(float(v)) for v in data.grids[task].efficiencies[:, -1]],
    )
    title = f"The oracle with {width} candidates, by number of heads"
    return [table("figure6_heads", title, "task", rows, columns)]


def _charts(data: _Oracle) -> list[Chart]:
    """A panel for every task, and one for all together."""
    return [
        Chart(
            f"figure6_{task or 'all'}",
            f"Oracle: {data.run.task_label(task, 'all tasks')}",
            LINES,
            "candidates k of each head",
            "tokens per call",
            [
                line_of(f"{heads} heads", dict(enumerate(row, start=1)))
                for heads, row in enumerate(grid.efficiencies, start=2)
            ],
        )
        for task, grid in data.grids.items()
    ]


@finding("With one candidate the oracle needs as many calls as BPD on every text.")
def _one_is_bpd(data: _Oracle) -> Judgement | str:
    oracle = _records(data.run)
    same = [
        draft.calls == oracle[text].calls[-1][0]
        for draft in data.run.drafts(BPD)
        if (text := (draft.task, draft.example)) in oracle
    ]
    if not same:
        return "BPD and the oracle were not recorded on the same texts."
    evidence = f"Equal on {sum(same)} of {len(same)} texts."
    return all(same), evidence


@finding("The oracle's block efficiency never decreases with the number of candidates.")
def _never_decreases(data: _Oracle) -> Judgement | str:
    if not data.tasks:
        return "Not measured."
    decreasing = [
        data.run.task_label(task)
        for task, line in data.tasks.items()
        if (np.diff(line) < 0).any()
    ]
    tasks = len(data.tasks)
    evidence = f"It never decreases on {tasks - len(decreasing)} of {tasks} tasks"
    listed = f", but does on {', '.join(decreasing)}" if decreasing else ""
    return not decreasing, f"{evidence}{listed}."


@finding("Further candidates have diminishing returns.")
def _diminishing_returns(data: _Oracle) -> Judgement | str:
    if ALL not in data.grids or data.grids[ALL].calls.shape[-1] < 3:
        return "Not measured."
    line = data.grids[ALL].efficiencies[-1]
    middle = (len(line) + 1) // 2
    early = (line[middle - 1] - line[0]) / (middle - 1)
    late = (line[-1] - line[middle - 1]) / (len(line) - middle)
    return (
        bool(late < early),
        f"Over all tasks {early:+.3f} tokens per call for each of the candidates 2 to "
        f"{middle}, {late:+.3f} for each later one.",
    )


def _weak_gain_most(data: _Oracle) -> Finding:
    statement = (
        "The lower BPD's block efficiency on a task, the more the oracle gains (in the "
        "paper 18 to 54 %)."
    )
    return trend_finding(statement, weak_headroom(data.run))


@finding("More heads help up to a point.")
def _more_heads(data: _Oracle) -> Judgement | str:
    if ALL not in data.grids or data.grids[ALL].calls.shape[1] < 2:
        return "Not measured."
    column = data.grids[ALL].efficiencies[:, -1]
    first, last = column[1] - column[0], column[-1] - column[-2]
    return (
        bool(column[-1] > column[0] and (len(column) < 3 or last < first)),
        f"Over all tasks the third head adds {first:+.3f} tokens per call to the "
        f"widest oracle, head {len(column) + 1} {last:+.3f}.",
    )


@finding("The oracle bounds every draft from the same lattice.")
def _bounds_all(data: _Oracle) -> Judgement | str:
    run, oracle = data.run, _records(data.run)
    # Serial calls of contenders and of the oracle, by contender and task. With one
    # candidate the oracle is BPD, so that BPD is left out.
    calls: dict[tuple[str, str], np.ndarray] = collections.defaultdict(
        lambda: np.zeros(2, int)
    )
    for name in run.contenders:
        method = method_of(name)
        if name == BPD or not is_bounded(method, method_of("oracle")):
            continue
        for draft in run.drafts(name):
            bound = oracle.get((draft.task, draft.example))
            if bound and (method.setting("k") or 0) <= len(bound.calls[0]):
                calls[name, draft.task] += draft.calls, bound.calls[-1][-1]
    if not calls:
        return "No refined draft was recorded on the oracle's texts."
    ratios = {key: drafted / bound for key, (drafted, bound) in calls.items()}
    name, task = min(ratios, key=ratios.__getitem__)
    return (
        bool(ratios[name, task] >= 1),
        f"Of {counted(len({name for name, _ in calls}), 'method')} on each task, "
        f"{run.label(name)} on {run.task_label(task)} is the closest: it needs "
        f"{ratios[name, task]:.2f} times the oracle's calls.",
    )


STUDY = Study(
    "figure6",
    "The oracle",
    "Figure 6",
    "How many tokens would a call yield if the best path through the heads' lattice "
    "were always found, by number of candidates and of heads?",
    measures=(ORACLE, DRAFTS),
    prepare=_prepare,
    tables=[_widths_table, _heads_table],
    charts=[_charts],
    findings=[
        _one_is_bpd,
        _never_decreases,
        _diminishing_returns,
        _weak_gain_most,
        _more_heads,
        _bounds_all,
    ],
    notes=[
        "The oracle drafts the longest prefix of the text that is in the lattice. At "
        "no position can a draft from the same lattice yield more tokens. On a "
        "complete text another draft may still need one call less, because a shorter "
        "step can end at a better position.",
        "The paper's values are those of its Tables 4 and 9 with nine heads and 1 "
        "(BPD), 2 and 16 candidates.",
    ],
)
