"""Table 5: positions at which refined drafts yield more or fewer tokens than BPD's."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bpd_jax.evaluation.draft_comparison import DraftComparison, compare_drafts
from bpd_jax.evaluation.efficiency import difference_interval
from bpd_jax.evaluation.entropy import Fit, fit_line
from bpd_jax.evaluation.significance import (
    FEWEST,
    combined_verdict,
    holm,
    sign_flip_test,
)
from bpd_jax.reporting.exhibits import BARS, Cell, Chart, Column, Finding, Table
from bpd_jax.studies import printed
from bpd_jax.studies.comparisons import printed_trend
from bpd_jax.studies.refinements import method_of
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.tables import (
    ALL,
    Judgement,
    by_row,
    cell,
    correlation,
    counted,
    decimal,
    judged,
    line_of,
    table,
    verdict,
)

_COLUMNS = [
    Column("ties", digits=0),
    *(
        column
        for group in ("wins", "losses")
        for column in (
            Column("positions", group, digits=0),
            Column("repair", group, digits=1, unit="%"),
            Column("introduce", group, digits=1, unit="%"),
        )
    ),
    Column("p", digits=3),
]


class _Comparisons(NamedTuple):
    """Comparisons of one contender with BPD, by task and `ALL`, for every example."""

    run: StudyRun
    contender: str
    name: str
    examples: dict[str | None, list[DraftComparison]]

    @property
    def label(self) -> str:
        return self.run.label(self.contender)

    def total(self, task: str | None = ALL) -> DraftComparison:
        """The sum over the examples of a task."""
        return sum(self.examples[task], DraftComparison())

    def margins(self, task: str | None) -> np.ndarray:
        """Wins minus losses of each example, `[n]`."""
        pairs = [(c.wins.total, c.losses.total) for c in self.examples[task]]
        return np.array([wins - losses for wins, losses in pairs], float)


def _prepare(run: StudyRun) -> list[_Comparisons]:
    refined = [name for name in run.contenders if name != BPD]
    return [
        _Comparisons(
            run,
            contender,
            f"table5_{number}" if number > 1 else "table5",
            {
                task: [
                    compare_drafts(a.yields, a.repeats, b.yields, b.repeats)
                    for a, b in zip(*run.paired([BPD, contender], task), strict=True)
                ]
                for task in run.rows()
            },
        )
        for number, contender in enumerate(refined, start=1)
    ]


def _tables(comparisons: list[_Comparisons]) -> list[Table]:
    return [_table(contender) for contender in comparisons]


def _table(contender: _Comparisons) -> Table:
    """A table with a row per task, and one for all tasks together."""
    method = method_of(contender.contender)
    # The paper's table is about local neural rescoring.
    like_paper = method.kind == "neural" and method.count == 1
    measured = [task for task, examples in contender.examples.items() if examples]
    corrected = holm([sign_flip_test(contender.margins(task)) for task in measured])
    p_values = dict(zip(measured, corrected, strict=True))

    def cells(task: str | None) -> list[Cell]:
        paper = printed.TABLE5.get(task or "", {}) if like_paper else {}
        values, text = _values(contender.total(task)), "none"
        if task not in p_values:
            values, text = dict.fromkeys(values), "not measured"
        row = [cell(value, paper.get(key), text=text) for key, value in values.items()]
        return [*row, cell(p_values.get(task))]

    title = f"{contender.label} against BPD, by token position"
    rows = contender.run.rows()
    return table(contender.name, title, "task", rows, by_row(_COLUMNS, cells))


def _values(total: DraftComparison) -> dict[str, float | None]:
    """The values in the order of the columns, by their names in `printed.TABLE5`."""
    values: dict[str, float | None] = {"ties": float(total.ties)}
    for name, changes in (("wins", total.wins), ("losses", total.losses)):
        values[name] = float(changes.total)
        for key, share in (("repair", changes.repair), ("regress", changes.regress)):
            values[f"{name}_{key}"] = None if share is None else 100 * share
    return values


def _charts(comparisons: list[_Comparisons]) -> list[Chart]:
    charts = []
    for contender in comparisons:
        totals = {task: contender.total(task) for task in contender.run.tasks}
        totals = {task: total for task, total in totals.items() if total.positions}
        bars = {
            side: [100 * getattr(t, side).total / t.positions for t in totals.values()]
            for side in ("wins", "losses")
        }
        charts.append(
            Chart(
                contender.name,
                f"{contender.label}: positions won and lost",
                BARS,
                "task",
                "% of positions",
                [
                    line_of(side, dict(enumerate(shares)))
                    for side, shares in bars.items()
                ],
                categories=[contender.run.task_label(task) for task in totals],
            )
        )
    return charts


class _Share(NamedTuple):
    """A share of positions that has a column in Table 5.

    Attributes:
      side: `wins` or `losses`.
      change: the counted field of `Changes`.
      column: column of the share in `printed.TABLE5`.
      words: words after the percentage.
    """

    side: str
    change: str
    column: str
    words: str

    def counts(self, comparison: DraftComparison) -> tuple[int, int]:
        """Number of positions with the change, and of all positions of the side."""
        changes = getattr(comparison, self.side)
        return getattr(changes, self.change), changes.total

    def ratio(self, comparison: DraftComparison) -> float | None:
        """The share; None without positions."""
        events, cases = self.counts(comparison)
        return events / cases if cases else None


_WINS_REPAIR = _Share("wins", "repaired", "wins_repair", "of wins repair")
_WINS_INTRODUCE = _Share("wins", "introduced", "wins_regress", "introduce")
_LOSSES_REPAIR = _Share("losses", "repaired", "losses_repair", "of losses")


def _more_often(
    share: _Share, other: _Share, comparisons: list[_Comparisons]
) -> Judgement:
    """Whether one share is significantly larger than another."""
    gaps = [_gap(contender, share, other) for contender in comparisons]
    rows = printed.TABLE5.values()
    paper = sum(row[share.column] > row[other.column] for row in rows)
    return (
        combined_verdict([holds for holds, _ in gaps]),
        f"{'. '.join(words for _, words in gaps)}. The paper does not state this; in "
        f"its table it holds on {paper} of {counted(len(rows), 'task')}.",
    )


def _gap(contender: _Comparisons, share: _Share, other: _Share) -> Judgement:
    """The difference of two shares for one contender, with its interval."""
    total = contender.total()
    value, base = share.ratio(total), other.ratio(total)
    if value is None or base is None:
        return None, f"{contender.label}: no wins or no losses"
    examples, interval = contender.examples[ALL], None
    between = f"{counted(len(examples), 'text')}: too few"
    if len(examples) >= FEWEST:
        counts = [np.array([s.counts(c) for c in examples]).T for s in (share, other)]
        interval = difference_interval(*counts[0], *counts[1])
    if interval is not None:
        low, high = (decimal(100 * end, 1, sign=True) for end in interval)
        between = f"{low} … {high}"
    totals = map(contender.total, contender.run.tasks)
    pairs = [(share.ratio(total), other.ratio(total)) for total in totals]
    more = [a > b for a, b in pairs if a is not None and b is not None]
    return (
        verdict(Cell(interval=interval), len(examples)),
        f"{contender.label}: {decimal(100 * value, 1)} % {share.words}, "
        f"{decimal(100 * base, 1)} % {other.words}, "
        f"{decimal(100 * (value - base), 1, sign=True)} percentage points ({between}), "
        f"more on {sum(more)} of {counted(len(more), 'task')}",
    )


def _weak_tasks(comparisons: list[_Comparisons]) -> Judgement:
    """Whether the margin of wins decreases with BPD's block efficiency."""
    verdicts, parts = [], []
    for contender in comparisons:
        base = contender.run.by_task(BPD)
        margins = {
            task: float(contender.margins(task).sum()) / contender.total(task).positions
            for task in base
            if contender.total(task).positions
        }
        fit = fit_line([base[task] for task in margins], [*margins.values()])
        verdicts.append(None if fit is None else fit.falls())
        parts.append(f"{contender.label}: {_trend(fit, margins)}")
    paper = {
        task: (row["wins"] - row["losses"])
        / (row["ties"] + row["wins"] + row["losses"])
        for task, row in printed.TABLE5.items()
    }
    return (
        combined_verdict(verdicts),
        f"{'. '.join(parts)}. The paper's tables: "
        f"{_trend(printed_trend(paper), paper)}.",
    )


def _trend(fit: Fit | None, margins: Mapping[str, float]) -> str:
    """A rank correlation with its p-value, and the number of tasks with more wins."""
    words = "too few tasks" if fit is None else f"rank correlation {correlation(fit)}"
    winning = sum(margin > 0 for margin in margins.values())
    return (
        f"{words}; more wins than losses on {winning} of "
        f"{counted(len(margins), 'task')}"
    )


def _findings(comparisons: list[_Comparisons]) -> list[Finding]:
    """Findings about all refinements together."""
    if not comparisons:
        return []
    repairs = (
        "At positions where refinement wins, it repairs repetition more often than"
    )
    return [
        judged(
            f"{repairs} at those where it loses.",
            _more_often(_WINS_REPAIR, _LOSSES_REPAIR, comparisons),
        ),
        judged(
            f"{repairs} it introduces repetition.",
            _more_often(_WINS_REPAIR, _WINS_INTRODUCE, comparisons),
        ),
        judged(
            "The lower BPD's block efficiency on a task, the more wins exceed losses.",
            _weak_tasks(comparisons),
        ),
    ]


STUDY = Study(
    "table5",
    "Wins and losses of refined drafts",
    "Table 5",
    "At how many positions of the texts do refined drafts yield more or fewer tokens "
    "than BPD's, and how often does refinement repair repetition there?",
    prepare=_prepare,
    tables=[_tables],
    charts=[_charts],
    findings=[_findings],
    notes=[
        "Every token of a text is one position, even if decoding does not call the "
        "model there. The paper's counts add up to 128 positions for each passage of "
        "LAMBADA and 325 for each example of MultiNews, if it reports on the public "
        "test splits.",
        "Repair means that the unrefined draft has equal neighbours and the refined "
        "one has none; introduction is the reverse. Of several drafts, the best-scored "
        "one is considered.",
        "The paper's table is about local rescoring with its 61M model (caption and "
        "section 7.3): its values are shown with those of one draft under a neural "
        "rescorer. They are counts over other texts: compare percentages, not counts.",
        "p-values are from a sign-flip test of wins minus losses over examples, after "
        "Holm's correction for the rows of a table.",
        "A finding holds if it is significant for every refinement, and fails if the "
        "reverse is significant for one. Significant means that the 95 % bootstrap "
        "interval over texts of a difference of shares excludes 0, or that the p-value "
        "of a rank correlation is below 0.05.",
    ],
)
