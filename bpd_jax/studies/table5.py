"""Table 5: where refined drafts yield more or fewer tokens than vanilla ones."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from bpd_jax.evaluation.draft_comparison import DraftComparison, compare_drafts
from bpd_jax.evaluation.efficiency import difference_interval
from bpd_jax.evaluation.entropy import Fit, fit_line
from bpd_jax.evaluation.significance import FEWEST, holm, sign_flip_test, together
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
    """One contender against BPD, example by example, by task and `ALL`."""

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
        """Wins minus losses of each example."""
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


def _tables(every: list[_Comparisons]) -> list[Table]:
    return [_table(one) for one in every]


def _table(one: _Comparisons) -> Table:
    """Rows for tasks and for all of them together."""
    method = method_of(one.contender)
    # The paper's table is about local neural rescoring.
    like_paper = method.kind == "neural" and method.count == 1
    measured = [task for task, examples in one.examples.items() if examples]
    corrected = holm([sign_flip_test(one.margins(task)) for task in measured])
    p_values = dict(zip(measured, corrected, strict=True))

    def cells(task: str | None) -> list[Cell]:
        paper = printed.TABLE5.get(task or "", {}) if like_paper else {}
        values, text = _values(one.total(task)), "none"
        if task not in p_values:
            values, text = dict.fromkeys(values), "not measured"
        row = [cell(value, paper.get(key), text=text) for key, value in values.items()]
        return [*row, cell(p_values.get(task))]

    title = f"{one.label} against BPD, by token position"
    return table(one.name, title, "task", one.run.rows(), by_row(_COLUMNS, cells))


def _values(total: DraftComparison) -> dict[str, float | None]:
    """Values in the order of the columns, under their names in `printed.TABLE5`."""
    values: dict[str, float | None] = {"ties": float(total.ties)}
    for name, changes in (("wins", total.wins), ("losses", total.losses)):
        values[name] = float(changes.total)
        for key, share in (("repair", changes.repair), ("regress", changes.regress)):
            values[f"{name}_{key}"] = None if share is None else 100 * share
    return values


def _charts(every: list[_Comparisons]) -> list[Chart]:
    charts = []
    for one in every:
        totals = {t: one.total(t) for t in one.run.tasks if one.examples[t]}
        totals = {task: total for task, total in totals.items() if total.positions}
        bars = {
            side: [100 * getattr(t, side).total / t.positions for t in totals.values()]
            for side in ("wins", "losses")
        }
        charts.append(
            Chart(
                one.name,
                f"{one.label}: positions won and lost",
                BARS,
                "task",
                "% of positions",
                [
                    line_of(side, dict(enumerate(shares)))
                    for side, shares in bars.items()
                ],
                categories=[one.run.task_label(task) for task in totals],
            )
        )
    return charts


class _Share(NamedTuple):
    """A share of positions that Table 5 has a column for.

    Attributes:
      side: `wins` or `losses`.
      change: the field of `Changes` that is counted there.
      column: of the share in `printed.TABLE5`.
      words: after the percentage.
    """

    side: str
    change: str
    column: str
    words: str

    def counts(self, comparison: DraftComparison) -> tuple[int, int]:
        """Positions with the change, and all of that side."""
        changes = getattr(comparison, self.side)
        return getattr(changes, self.change), changes.total

    def ratio(self, comparison: DraftComparison) -> float | None:
        """The share; None of no positions."""
        events, cases = self.counts(comparison)
        return events / cases if cases else None


_WINS_REPAIR = _Share("wins", "repaired", "wins_repair", "of wins repair")
_WINS_INTRODUCE = _Share("wins", "introduced", "wins_regress", "introduce")
_LOSSES_REPAIR = _Share("losses", "repaired", "losses_repair", "of losses")


def _more_often(share: _Share, other: _Share, every: list[_Comparisons]) -> Judgement:
    """Whether one share is larger than another by more than chance."""
    gaps = [_gap(one, share, other) for one in every]
    rows = printed.TABLE5.values()
    paper = sum(row[share.column] > row[other.column] for row in rows)
    return (
        together([holds for holds, _ in gaps]),
        f"{'. '.join(words for _, words in gaps)}. This question is ours; in the "
        f"paper's table it is so on {paper} of {counted(len(rows), 'task')}.",
    )


def _gap(one: _Comparisons, share: _Share, other: _Share) -> Judgement:
    """The difference of two shares for one contender, with its interval."""
    mine, theirs = share.ratio(one.total()), other.ratio(one.total())
    if mine is None or theirs is None:
        return None, f"{one.label}: no wins or no losses"
    examples, interval = one.examples[ALL], None
    between = f"{counted(len(examples), 'text')}: too few"
    if len(examples) >= FEWEST:
        counts = [np.array([s.counts(c) for c in examples]).T for s in (share, other)]
        interval = difference_interval(*counts[0], *counts[1])
    if interval is not None:
        low, high = (decimal(100 * end, 1, sign=True) for end in interval)
        between = f"{low} … {high}"
    pairs = [(share.ratio(t), other.ratio(t)) for t in map(one.total, one.run.tasks)]
    more = [a > b for a, b in pairs if a is not None and b is not None]
    return (
        verdict(Cell(interval=interval), len(examples)),
        f"{one.label}: {decimal(100 * mine, 1)} % {share.words}, "
        f"{decimal(100 * theirs, 1)} % {other.words}, "
        f"{decimal(100 * (mine - theirs), 1, sign=True)} points ({between}), more on "
        f"{sum(more)} of {counted(len(more), 'task')}",
    )


def _weak_tasks(every: list[_Comparisons]) -> Judgement:
    """Whether what refinement wins falls with what BPD accepts."""
    verdicts, parts = [], []
    for one in every:
        base = one.run.by_task(BPD)
        margins = {
            task: float(one.margins(task).sum()) / one.total(task).positions
            for task in base
            if one.total(task).positions
        }
        fit = fit_line([base[task] for task in margins], [*margins.values()])
        verdicts.append(None if fit is None else fit.falls())
        parts.append(f"{one.label}: {_trend(fit, margins)}")
    paper = {
        task: (row["wins"] - row["losses"])
        / (row["ties"] + row["wins"] + row["losses"])
        for task, row in printed.TABLE5.items()
    }
    return (
        together(verdicts),
        f"{'. '.join(parts)}. The paper's tables: "
        f"{_trend(printed_trend(paper), paper)}.",
    )


def _trend(fit: Fit | None, margins: Mapping[str, float]) -> str:
    """A rank correlation with its p, and on how many tasks wins prevail."""
    words = "too few tasks" if fit is None else f"rank correlation {correlation(fit)}"
    winning = sum(margin > 0 for margin in margins.values())
    return (
        f"{words}; more wins than losses on {winning} of "
        f"{counted(len(margins), 'task')}"
    )


def _findings(every: list[_Comparisons]) -> list[Finding]:
    """Statements about all refinements together."""
    repairs = "Where refinement wins, it repairs repetition more often than"
    parts: dict[str, Callable[[list[_Comparisons]], Judgement]] = {
        f"{repairs} where it loses.": functools.partial(
            _more_often, _WINS_REPAIR, _LOSSES_REPAIR
        ),
        f"{repairs} it introduces it.": functools.partial(
            _more_often, _WINS_REPAIR, _WINS_INTRODUCE
        ),
        "The less BPD accepts on a task, the more refinement wins over what it "
        "loses.": _weak_tasks,
    }
    return [judged(words, judge(every)) for words, judge in parts.items() if every]


STUDY = Study(
    "table5",
    "Wins and losses of refined drafts",
    "Table 5",
    "At how many positions of the texts do refined drafts yield more or fewer tokens "
    "than vanilla ones, and how often does that go with repaired repetition?",
    prepare=_prepare,
    tables=[_tables],
    charts=[_charts],
    findings=[_findings],
    notes=[
        "Every token of a text is one position, whether decoding calls the model there "
        "or not. The paper's counts add up to 128 positions of each passage of LAMBADA "
        "and 325 of each example of MultiNews, if it reports on the public test "
        "splits.",
        "Repairing means that the vanilla draft has equal neighbours and the refined "
        "one has none; introducing is the reverse. Several drafts are judged by the "
        "one that scores best.",
        "The paper's table is about local rescoring with its 61M model (caption and "
        "section 7.3): its numbers are shown beside those of one draft under a neural "
        "rescorer. They count other texts: compare percentages, not counts.",
        "p is of a sign-flip test over examples of wins minus losses, after Holm's "
        "correction for the rows of a table.",
        "A finding holds if it does for every refinement, and fails if the reverse is "
        "true of one, by more than chance: the bootstrap interval of a difference of "
        "shares, 95 % over texts, leaves out 0, or p of a rank correlation is below "
        "0.05.",
    ],
)
