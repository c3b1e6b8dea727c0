"""Table 5: positions at which refined drafts yield more or fewer tokens than BPD's."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bpd_jax.evaluation.efficiency import difference_interval
from bpd_jax.evaluation.statistics import (
    FEWEST,
    Fit,
    combined_verdict,
    fit_line,
    holm,
    sign_flip_test,
)
from bpd_jax.reporting.exhibits import (
    BARS,
    Cell,
    Chart,
    Column,
    Finding,
    Table,
    line_of,
)
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.study_records import DraftRecord
from bpd_jax.studies.tables import (
    ALL,
    Judgement,
    by_row,
    cell,
    correlation,
    counted,
    decimal,
    judged,
    table,
    verdict,
)
from experiments import printed
from experiments.comparisons import printed_trend
from experiments.refinements import method_of, of_heads

_SIDES = ("wins", "losses")
COUNTS = (
    "ties",
    "ties_repair",
    *(side + kind for side in _SIDES for kind in ("", "_repair", "_regress")),
)
"""What is counted, by the names of the columns of `printed.TABLE5`."""

_COLUMNS = [
    Column("positions", "ties", digits=0),
    Column("repair", "ties", digits=1, unit="%"),
    *(
        column
        for group in _SIDES
        for column in (
            Column("positions", group, digits=0),
            Column("repair", group, digits=1, unit="%"),
            Column("introduce", group, digits=1, unit="%"),
        )
    ),
    Column("p", digits=3),
]


def count_positions(vanilla: DraftRecord, refined: DraftRecord) -> list[int]:
    """Compares the drafts of two methods along one text, position by position.

    Every token of the text is a position, even if decoding makes no serial call there:
    LAMBADA's counts in Table 5 add up to its number of tokens. A win is a position
    where a call would yield more tokens with the refined draft. It repairs if the
    vanilla draft has equal neighbouring tokens and the refined draft has none; the
    reverse introduces (`regress`).

    Returns:
      The numbers of positions, in the order of `COUNTS`.
    """
    repaired = (vanilla.repeats > 0) & (refined.repeats == 0)
    introduced = (vanilla.repeats == 0) & (refined.repeats > 0)
    ties = refined.yields == vanilla.yields
    positions = [ties, ties & repaired]
    for side in (refined.yields > vanilla.yields, refined.yields < vanilla.yields):
        positions += [side, side & repaired, side & introduced]
    return [int(chosen.sum()) for chosen in positions]


class _Comparisons(NamedTuple):
    """Comparisons of one contender with BPD, by task and `ALL`.

    Attributes:
      run, contender: the run, and the name of the contender.
      name: name of the table.
      counts: `[n, 8]`, the numbers of positions of every example; see `COUNTS`.
    """

    run: StudyRun
    contender: str
    name: str
    counts: dict[str | None, np.ndarray]

    @property
    def label(self) -> str:
        return self.run.label(self.contender)

    @property
    def like_paper(self) -> bool:
        """Whether this is local neural rescoring, as in the paper's table."""
        method = method_of(self.contender)
        return of_heads(method, "neural") and method.count == 1

    def of(self, count: str, task: str | None = ALL) -> np.ndarray:
        """One of `COUNTS` in every example, `[n]`."""
        counts: np.ndarray = self.counts[task][:, COUNTS.index(count)]
        return counts

    def share(self, count: str, task: str | None = ALL) -> float | None:
        """The share of repairs or regressions of a side; None without positions."""
        events, cases = (int(self.of(c, task).sum()) for c in (count, _side(count)))
        return events / cases if cases else None

    def margins(self, task: str | None) -> np.ndarray:
        """Wins minus losses of each example, `[n]`."""
        return (self.of("wins", task) - self.of("losses", task)).astype(float)

    def positions(self, task: str | None) -> int:
        """The number of all positions."""
        return sum(int(self.of(count, task).sum()) for count in ("ties", *_SIDES))


def _side(count: str) -> str:
    return count.partition("_")[0]


def _prepare(run: StudyRun) -> list[_Comparisons]:
    refined = [name for name in run.contenders if name != BPD]
    return [
        _Comparisons(
            run,
            contender,
            f"table5_{number}" if number > 1 else "table5",
            {
                task: np.array(
                    list(map(count_positions, *run.paired([BPD, contender], task))), int
                ).reshape(-1, len(COUNTS))
                for task in run.rows()
            },
        )
        for number, contender in enumerate(refined, start=1)
    ]


def _table(contender: _Comparisons) -> Table:
    """A table with a row per task, and one for all tasks together."""
    measured = [task for task, counts in contender.counts.items() if len(counts)]
    corrected = holm([sign_flip_test(contender.margins(task)) for task in measured])
    p_values = dict(zip(measured, corrected, strict=True))

    def value(count: str, task: str | None) -> float | None:
        if count == _side(count):
            return float(contender.of(count, task).sum())
        share = contender.share(count, task)
        return None if share is None else 100 * share

    def cells(task: str | None) -> list[Cell]:
        paper = printed.TABLE5.get(task or "", {}) if contender.like_paper else {}
        if task not in p_values:
            row = [cell(None, paper.get(c), text="not measured") for c in COUNTS]
        else:
            row = [cell(value(c, task), paper.get(c), text="none") for c in COUNTS]
        return [*row, cell(p_values.get(task))]

    title = f"{contender.label} against BPD, by token position"
    rows = contender.run.rows()
    return table(contender.name, title, "task", rows, by_row(_COLUMNS, cells))


def _charts(comparisons: list[_Comparisons]) -> list[Chart]:
    charts = []
    for contender in comparisons:
        positions = {task: contender.positions(task) for task in contender.run.tasks}
        positions = {task: count for task, count in positions.items() if count}
        bars = [
            line_of(
                side,
                {
                    index: 100 * int(contender.of(side, task).sum()) / count
                    for index, (task, count) in enumerate(positions.items())
                },
            )
            for side in _SIDES
        ]
        charts.append(
            Chart(
                contender.name,
                f"{contender.label}: positions won and lost",
                BARS,
                "task",
                "% of positions",
                bars,
                categories=[contender.run.task_label(task) for task in positions],
            )
        )
    return charts


_WORDS = {
    "wins_repair": "of wins repair",
    "wins_regress": "introduce",
    "losses_repair": "of losses",
    "ties_repair": "of ties",
}
"""Shares that are compared, with the words after their percentages."""


def _more_often(share: str, other: str, comparisons: list[_Comparisons]) -> Judgement:
    """Whether one share is significantly larger than another."""
    gaps = [_gap(contender, share, other) for contender in comparisons]
    rows = [row for row in printed.TABLE5.values() if other in row]
    paper = sum(row[share] > row[other] for row in rows)
    in_table = f"in its table it holds on {paper} of {counted(len(rows), 'task')}"
    return (
        _combined(comparisons, [holds for holds, _ in gaps]),
        f"{'. '.join(words for _, words in gaps)}. The paper does not state this; "
        f"{in_table if rows else 'it does not print the share of ties'}.",
    )


def _combined(
    comparisons: list[_Comparisons], verdicts: list[bool | None]
) -> bool | None:
    """The verdict on local neural rescoring; without it, on all refinements."""
    pairs = list(zip(comparisons, verdicts, strict=True))
    decisive = [holds for contender, holds in pairs if contender.like_paper]
    return combined_verdict(decisive or verdicts)


def _gap(contender: _Comparisons, share: str, other: str) -> Judgement:
    """The difference of two shares for one contender, with its interval."""
    value, base = contender.share(share), contender.share(other)
    if value is None or base is None:
        return None, f"{contender.label}: no wins or no losses"
    examples, interval = len(contender.counts[ALL]), None
    between = f"{counted(examples, 'text')}: too few"
    if examples >= FEWEST:
        counts = [contender.of(c) for s in (share, other) for c in (s, _side(s))]
        interval = difference_interval(*counts)
    if interval is not None:
        low, high = (decimal(100 * end, 1, sign=True) for end in interval)
        between = f"{low} … {high}"
    tasks = contender.run.tasks
    pairs = [(contender.share(share, t), contender.share(other, t)) for t in tasks]
    more = [a > b for a, b in pairs if a is not None and b is not None]
    return (
        verdict(Cell(interval=interval), examples),
        f"{contender.label}: {decimal(100 * value, 1)} % {_WORDS[share]}, "
        f"{decimal(100 * base, 1)} % {_WORDS[other]}, "
        f"{decimal(100 * (value - base), 1, sign=True)} percentage points ({between}), "
        f"more on {sum(more)} of {counted(len(more), 'task')}",
    )


def _weak_tasks(comparisons: list[_Comparisons]) -> Judgement:
    """Whether the margin of wins decreases with BPD's block efficiency."""
    verdicts, parts = [], []
    for contender in comparisons:
        base, _ = contender.run.by_task(BPD, contender.contender)
        margins = {
            task: float(contender.margins(task).sum()) / positions
            for task in base
            if (positions := contender.positions(task))
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
        _combined(comparisons, verdicts),
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
            _more_often("wins_repair", "losses_repair", comparisons),
        ),
        judged(
            f"{repairs} at those where it changes nothing, the base rate.",
            _more_often("wins_repair", "ties_repair", comparisons),
        ),
        judged(
            f"{repairs} it introduces repetition.",
            _more_often("wins_repair", "wins_regress", comparisons),
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
    tables=[lambda comparisons: list(map(_table, comparisons))],
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
        "A finding holds if it is significant for one draft under every neural "
        "rescorer, and fails if the reverse is significant for one of them; other "
        "refinements are listed for comparison, and decide only where no neural "
        "rescorer was measured. Significant means that the 95 % bootstrap interval "
        "over texts of a difference of shares excludes 0, or that the p-value of a "
        "rank correlation is below 0.05.",
    ],
)
