"""Table 5: where refined drafts yield more or less than vanilla ones, and why."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from bpd_jax.evaluation.draft_comparison import (
    Changes,
    DraftComparison,
    compare_drafts,
)
from bpd_jax.evaluation.efficiency import difference_interval
from bpd_jax.evaluation.entropy import fit_line
from bpd_jax.evaluation.significance import (
    FEWEST,
    holm,
    side,
    sign_flip_test,
    together,
)
from bpd_jax.reporting.exhibits import (
    BARS,
    Chart,
    Column,
    Exhibit,
    Finding,
    Row,
    Table,
)
from bpd_jax.studies import printed
from bpd_jax.studies.comparisons import printed_trend
from bpd_jax.studies.config import BPD, parse_contender
from bpd_jax.studies.results import (
    ALL,
    by_task,
    cell,
    contenders_of,
    counted,
    decimal,
    line_of,
    paired,
    task_name,
    tasks_of,
)
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study

NOTES = [
    "Every token of a text is one position, whether decoding calls the model there or "
    "not. The paper's counts add up to 128 positions of each passage of LAMBADA and "
    "325 of each example of MultiNews, if it reports on the public test splits.",
    "Repairing means that the vanilla draft has equal neighbours and the refined one "
    "has none; introducing is the reverse. Several drafts are judged by the one that "
    "scores best.",
    "The paper's table is about local rescoring with its 61M model (caption and "
    "section 7.3): its numbers stand beside one draft under a neural rescorer. They "
    "count other texts, so that percentages compare and counts do not.",
    "p is of a sign-flip test over examples of wins minus losses, after Holm's "
    "correction for the rows of a table.",
    "A finding holds if it does for every refinement, and fails if the reverse is true "
    "of one, by more than chance: the bootstrap interval of a difference of shares, "
    "95 % over texts, leaves out 0, or p of a rank correlation is below 0.05.",
]

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


@dataclasses.dataclass(frozen=True)
class _TaskCounts:
    """Comparisons of one task, example by example."""

    examples: list[DraftComparison]

    @property
    def total(self) -> DraftComparison:
        """Their sum."""
        return sum(self.examples, DraftComparison())

    @property
    def margins(self) -> np.ndarray:
        """Wins minus losses of each."""
        return np.array([o.wins.total - o.losses.total for o in self.examples], float)


Counts = dict[str | None, _TaskCounts]
"""By task; `ALL` for all together."""


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws one table and one chart for every contender but BPD."""
    tables, charts, compared = [], [], {}
    refined = [name for name in contenders_of(run) if name != BPD]
    for number, contender in enumerate(refined, start=1):
        counts: Counts = {
            task: _TaskCounts(
                [
                    compare_drafts(a.yields, a.repeats, b.yields, b.repeats)
                    for a, b in zip(*paired(run, [BPD, contender], task), strict=True)
                ]
            )
            for task in [*tasks_of(run), ALL]
        }
        name = "table5" if number == 1 else f"table5_{number}"
        tables.append(_table(run, name, contender, counts))
        charts.append(_chart(run, name, contender, counts))
        compared[run.label(contender)] = counts
    return study.show(
        run,
        tables=tables,
        charts=charts,
        findings=_findings(run, compared),
        notes=NOTES,
    )


def _table(run: StudyRun, name: str, contender: str, counts: Counts) -> Table:
    """Rows for tasks and for all of them together."""
    method = parse_contender(contender).method
    # The paper's table is about local neural rescoring.
    like_paper = method.kind == "neural" and method.count == 1
    measured = [task for task, one in counts.items() if one.examples]
    corrected = holm([sign_flip_test(counts[task].margins) for task in measured])
    p_values = dict(zip(measured, corrected, strict=True))
    rows = []
    for task, one in counts.items():
        paper = printed.TABLE5.get(task or "", {}) if like_paper else {}
        text = "none" if one.examples else "not measured"
        cells = [
            cell(value if one.examples else None, paper.get(key), text=text)
            for key, value in _entries(one.total).items()
        ]
        label = task_name(run, task, "All")
        rows.append(Row(label, [*cells, cell(p_values.get(task))], strong=task is ALL))
    title = f"{run.label(contender)} against BPD, by token position"
    return Table(name, title, "task", _COLUMNS, rows)


def _entries(total: DraftComparison) -> dict[str, float | None]:
    """Values in the order of the columns, under their names in `printed.TABLE5`."""
    found: dict[str, float | None] = {"ties": float(total.ties)}
    for name, changes in (("wins", total.wins), ("losses", total.losses)):
        found[name] = float(changes.total)
        for key, share in (("repair", changes.repair), ("regress", changes.regress)):
            found[f"{name}_{key}"] = None if share is None else 100 * share
    return found


def _chart(run: StudyRun, name: str, contender: str, counts: Counts) -> Chart:
    measured = {t: c.total for t, c in counts.items() if t and c.total.positions}
    return Chart(
        name,
        f"{run.label(contender)}: positions won and lost",
        BARS,
        "task",
        "% of positions",
        [
            line_of(
                side,
                {
                    index: 100 * getattr(one, side).total / one.positions
                    for index, one in enumerate(measured.values())
                },
            )
            for side in ("wins", "losses")
        ],
        categories=[run.task_label(task) for task in measured],
    )


@dataclasses.dataclass(frozen=True)
class _Share:
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

    def counts(self, outcomes: DraftComparison) -> tuple[int, int]:
        """Positions with the change, and all of that side."""
        changes: Changes = getattr(outcomes, self.side)
        return getattr(changes, self.change), changes.total


_WINS_REPAIR = _Share("wins", "repaired", "wins_repair", "of wins repair")
_WINS_INTRODUCE = _Share("wins", "introduced", "wins_regress", "introduce")
_LOSSES_REPAIR = _Share("losses", "repaired", "losses_repair", "of losses")


def _findings(run: StudyRun, compared: Mapping[str, Counts]) -> list[Finding]:
    """Statements about all refinements together, which stand under their labels."""
    if not compared:
        return []
    return [
        _more_often(
            "Where refinement wins, it repairs repetition more often than where it "
            "loses.",
            _WINS_REPAIR,
            _LOSSES_REPAIR,
            compared,
        ),
        _more_often(
            "Where refinement wins, it repairs repetition more often than it "
            "introduces it.",
            _WINS_REPAIR,
            _WINS_INTRODUCE,
            compared,
        ),
        _weak_tasks(run, compared),
    ]


def _more_often(
    statement: str, share: _Share, other: _Share, compared: Mapping[str, Counts]
) -> Finding:
    """Whether one share is larger than another by more than chance."""
    found = [_gap(label, share, other, counts) for label, counts in compared.items()]
    rows = printed.TABLE5.values()
    paper = sum(row[share.column] > row[other.column] for row in rows)
    return Finding(
        statement,
        together([holds for holds, _ in found]),
        f"{'. '.join(words for _, words in found)}. A question of ours; by the paper's "
        f"table so on {paper} of {counted(len(rows), 'task')}.",
    )


def _gap(
    label: str, share: _Share, other: _Share, counts: Counts
) -> tuple[bool | None, str]:
    """What a difference of shares says about one contender, and its numbers."""
    whole = counts[None]
    mine, theirs = _ratio(whole, share), _ratio(whole, other)
    if mine is None or theirs is None:
        return None, f"{label}: no wins or no losses"
    interval = _interval(whole.examples, share, other)
    between = f"{counted(len(whole.examples), 'text')}: too few"
    if interval is not None:
        low, high = (decimal(100 * end, 1, sign=True) for end in interval)
        between = f"{low} … {high}"
    pairs = [
        (_ratio(one, share), _ratio(one, other)) for task, one in counts.items() if task
    ]
    more = [a > b for a, b in pairs if a is not None and b is not None]
    return (
        None if interval is None else side(interval),
        f"{label}: {decimal(100 * mine, 1)} % {share.words}, "
        f"{decimal(100 * theirs, 1)} % {other.words}, "
        f"{decimal(100 * (mine - theirs), 1, sign=True)} points ({between}), more on "
        f"{sum(more)} of {counted(len(more), 'task')}",
    )


def _ratio(counts: _TaskCounts, share: _Share) -> float | None:
    """The share; None of no positions."""
    events, cases = share.counts(counts.total)
    return events / cases if cases else None


def _interval(
    examples: list[DraftComparison], share: _Share, other: _Share
) -> tuple[float, float] | None:
    """Of the first share minus the other; None if the examples are too few."""
    if len(examples) < FEWEST:
        return None
    mine, theirs = (np.array([s.counts(o) for o in examples]) for s in (share, other))
    return difference_interval(*mine.T, *theirs.T)


def _weak_tasks(run: StudyRun, compared: Mapping[str, Counts]) -> Finding:
    """Whether what refinement wins falls with what BPD accepts."""
    base = by_task(run, BPD)
    verdicts, parts = [], []
    for label, counts in compared.items():
        margins = {
            task: one.margins.sum() / one.total.positions
            for task, one in counts.items()
            if task in base and one.total.positions
        }
        fit = fit_line([base[task] for task in margins], [*margins.values()])
        verdicts.append(None if fit is None else fit.falls())
        trend = None if fit is None else (fit.rank_correlation, fit.p_value)
        parts.append(f"{label}: {_trend(trend, margins)}")
    paper = {
        task: (row["wins"] - row["losses"])
        / (row["ties"] + row["wins"] + row["losses"])
        for task, row in printed.TABLE5.items()
    }
    return Finding(
        "The less BPD accepts on a task, the more refinement wins over what it loses.",
        together(verdicts),
        f"{'. '.join(parts)}. The paper's tables: "
        f"{_trend(printed_trend(paper), paper)}.",
    )


def _trend(trend: tuple[float, float] | None, margins: Mapping[str, float]) -> str:
    """A rank correlation with its p, and on how many tasks wins prevail."""
    words = "too few tasks"
    if trend is not None:
        words = f"rank correlation {decimal(trend[0])} (p = {trend[1]:.2g})"
    winning = sum(margin > 0 for margin in margins.values())
    return (
        f"{words}; more wins than losses on {winning} of "
        f"{counted(len(margins), 'task')}"
    )


STUDY = Study(
    "table5",
    "Wins and losses of refined drafts",
    "Table 5",
    "At how many positions of the texts do refined drafts yield more or fewer tokens "
    "than vanilla ones, and how often does that go with repaired repetition?",
    present,
)
