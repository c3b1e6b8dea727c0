"""Table 5: where refined drafts yield more or less than vanilla ones, and why."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from bpd_jax.evaluation.efficiency import difference_interval
from bpd_jax.evaluation.entropy import Fit, fit_line
from bpd_jax.evaluation.outcomes import Changes, Outcomes, compare_drafts
from bpd_jax.evaluation.significance import (
    FEWEST,
    holm,
    side,
    sign_flip_test,
    together,
)
from bpd_jax.reporting.exhibits import (
    Cell,
    Chart,
    Column,
    Exhibit,
    Finding,
    Row,
    Series,
    Table,
)
from bpd_jax.studies import printed
from bpd_jax.studies.config import BPD, parse_contender
from bpd_jax.studies.pairing import contenders_of, paired
from bpd_jax.studies.phrases import counted, decimal
from bpd_jax.studies.records import DraftRecord, from_digits
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.summary import drafts_of, efficiency, tasks_of

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


_MISSING = Cell(text="not measured")


@dataclasses.dataclass(frozen=True)
class _Counts:
    """Outcomes of one task, example by example."""

    examples: list[Outcomes]

    @property
    def outcomes(self) -> Outcomes:
        """Their sum."""
        return sum(self.examples, Outcomes())

    @property
    def margins(self) -> np.ndarray:
        """Wins minus losses of each."""
        return np.array([o.wins.total - o.losses.total for o in self.examples], float)


Counts = dict[str | None, _Counts]
"""By task; None for all together."""


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws one table and one chart for every contender but BPD."""
    tables, charts, compared = [], [], {}
    refined = [name for name in contenders_of(run) if name != BPD]
    for number, contender in enumerate(refined):
        counts: Counts = {
            task: _counts(run, contender, task) for task in [*tasks_of(run), None]
        }
        name = "table5" if not number else f"table5_{number + 1}"
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


def _counts(run: StudyRun, contender: str, task: str | None) -> _Counts:
    base, refined = paired(run, [BPD, contender], task)
    return _Counts([_compare(a, b) for a, b in zip(base, refined, strict=True)])


def _compare(vanilla: DraftRecord, refined: DraftRecord) -> Outcomes:
    return compare_drafts(
        from_digits(vanilla.accepted),
        from_digits(vanilla.equal),
        from_digits(refined.accepted),
        from_digits(refined.equal),
    )


def _table(run: StudyRun, name: str, contender: str, counts: Counts) -> Table:
    """Rows for tasks and for all of them together."""
    like_paper = _like_paper(contender)
    measured = [task for task, one in counts.items() if one.examples]
    corrected = holm([sign_flip_test(counts[task].margins) for task in measured])
    p_values = dict(zip(measured, map(Cell, corrected), strict=True))
    rows = []
    for task, one in counts.items():
        paper = printed.TABLE5.get(task, {}) if task and like_paper else {}
        cells = [*_cells(one, paper), p_values.get(task, _MISSING)]
        label = run.task_label(task) if task else "All"
        rows.append(Row(label, cells, strong=task is None))
    return Table(
        name,
        f"{run.label(contender)} against BPD, by token position",
        "task",
        _COLUMNS,
        rows,
    )


def _like_paper(contender: str) -> bool:
    """Whether it does what the paper's table is about: local neural rescoring."""
    method = parse_contender(contender).method
    return method.kind == "neural" and method.count == 1


def _cells(found: _Counts, paper: dict[str, float]) -> list[Cell]:
    entries = _entries(found.outcomes)
    if not found.examples:
        return [Cell(paper=paper.get(name), text=_MISSING.text) for name, _ in entries]
    return [
        Cell(value, paper.get(name), text="" if value is not None else "none")
        for name, value in entries
    ]


def _entries(outcomes: Outcomes) -> list[tuple[str, float | None]]:
    """Values in the order of the columns, under their names in `printed.TABLE5`."""

    def percent(share: float | None) -> float | None:
        return None if share is None else 100 * share

    def side(name: str, changes: Changes) -> list[tuple[str, float | None]]:
        return [
            (name, float(changes.total)),
            (f"{name}_repair", percent(changes.repair)),
            (f"{name}_regress", percent(changes.regress)),
        ]

    return [
        ("ties", float(outcomes.ties)),
        *side("wins", outcomes.wins),
        *side("losses", outcomes.losses),
    ]


def _chart(run: StudyRun, name: str, contender: str, counts: Counts) -> Chart:
    measured = {t: c.outcomes for t, c in counts.items() if t and c.outcomes.positions}
    places = [float(index) for index in range(len(measured))]
    wins = [100 * one.wins.total / one.positions for one in measured.values()]
    losses = [100 * one.losses.total / one.positions for one in measured.values()]
    return Chart(
        name,
        f"{run.label(contender)}: positions won and lost",
        "bars",
        "task",
        "% of positions",
        [Series("wins", places, wins), Series("losses", places, losses)],
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

    def counts(self, outcomes: Outcomes) -> tuple[int, int]:
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


def _ratio(counts: _Counts, share: _Share) -> float | None:
    """The share; None of no positions."""
    events, cases = share.counts(counts.outcomes)
    return events / cases if cases else None


def _interval(
    examples: list[Outcomes], share: _Share, other: _Share
) -> tuple[float, float] | None:
    """Of the first share minus the other; None if the examples are too few."""
    if len(examples) < FEWEST:
        return None
    mine, theirs = (np.array([s.counts(o) for o in examples]) for s in (share, other))
    return difference_interval(*mine.T, *theirs.T)


def _weak_tasks(run: StudyRun, compared: Mapping[str, Counts]) -> Finding:
    """Whether what refinement wins falls with what BPD accepts."""
    base = {
        task: value
        for task in tasks_of(run)
        if (value := efficiency(drafts_of(run, BPD, task))) is not None
    }
    verdicts, parts = [], []
    for label, counts in compared.items():
        margins = {
            task: one.margins.sum() / one.outcomes.positions
            for task, one in counts.items()
            if task in base and one.outcomes.positions
        }
        fit = fit_line([base[task] for task in margins], [*margins.values()])
        verdicts.append(None if fit is None else fit.falls())
        winning = sum(margin > 0 for margin in margins.values())
        correlation = "too few tasks" if fit is None else _correlation(fit)
        parts.append(
            f"{label}: {correlation}; more wins than losses on {winning} of "
            f"{counted(len(margins), 'task')}"
        )
    return Finding(
        "The less BPD accepts on a task, the more refinement wins over what it loses.",
        together(verdicts),
        f"{'. '.join(parts)}. The paper's tables: {_paper_correlation()}.",
    )


def _correlation(fit: Fit) -> str:
    return f"rank correlation {decimal(fit.rank_correlation)} (p = {fit.p_value:.2g})"


def _paper_correlation() -> str:
    """The same of Tables 4 and 5 as printed."""
    base = printed.column(printed.TABLE4, BPD)
    margins = {
        task: (row["wins"] - row["losses"])
        / (row["ties"] + row["wins"] + row["losses"])
        for task, row in printed.TABLE5.items()
    }
    fit = fit_line([base[task] for task in margins], [*margins.values()])
    assert fit is not None
    winning = sum(margin > 0 for margin in margins.values())
    return (
        f"{_correlation(fit)}; more wins than losses on {winning} of "
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
