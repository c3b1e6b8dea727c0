"""Table 5: where refined drafts yield more or less than vanilla ones, and why."""

import dataclasses

import numpy as np

from bpd_jax.evaluation.entropy import fit_line
from bpd_jax.evaluation.outcomes import Changes, Outcomes, compare_drafts
from bpd_jax.evaluation.significance import holm, sign_flip_test
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
from bpd_jax.studies.records import DraftRecord, from_digits
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.summary import drafts_of, efficiency, tasks_of

NOTES = [
    "Every token of a text is one position, whether decoding calls the model there or "
    "not: so the paper's counts for LAMBADA add up to 128 tokens of each passage.",
    "Repairing means that the vanilla draft has equal neighbours and the refined one "
    "has none; introducing is the reverse. Several drafts are judged by the one that "
    "scores best.",
    "The sources do not say which refinement the paper's table is about. Its numbers "
    "stand beside one draft under an n-gram model. They count other texts, so that "
    "percentages compare and counts do not.",
    "p is of a sign-flip test over examples of wins minus losses, after Holm's "
    "correction for the rows of a table.",
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
    """Of one task: its sum over examples, and wins minus losses of each."""

    outcomes: Outcomes
    margins: np.ndarray


Counts = dict[str | None, _Counts]
"""By task; None for all together."""


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws one table and one chart for every contender but BPD."""
    tables, charts, findings = [], [], []
    refined = [name for name in contenders_of(run) if name != BPD]
    for number, contender in enumerate(refined):
        counts: Counts = {
            task: _counts(run, contender, task) for task in [*tasks_of(run), None]
        }
        name = "table5" if not number else f"table5_{number + 1}"
        tables.append(_table(run, name, contender, counts))
        charts.append(_chart(run, name, contender, counts))
        findings += _findings(run, contender, counts)
    return Exhibit(
        study.name,
        study.title,
        study.paper,
        study.question,
        tables=tables,
        charts=charts,
        findings=findings,
        notes=NOTES,
        facts=run.facts,
    )


def _counts(run: StudyRun, contender: str, task: str | None) -> _Counts:
    base, refined = paired(run, [BPD, contender], task)
    found = [_compare(a, b) for a, b in zip(base, refined, strict=True)]
    margins = np.array([one.wins.total - one.losses.total for one in found], float)
    return _Counts(sum(found, Outcomes()), margins)


def _compare(vanilla: DraftRecord, refined: DraftRecord) -> Outcomes:
    return compare_drafts(
        from_digits(vanilla.accepted),
        from_digits(vanilla.equal),
        from_digits(refined.accepted),
        from_digits(refined.equal),
    )


def _table(run: StudyRun, name: str, contender: str, counts: Counts) -> Table:
    """Rows for tasks and for all of them together."""
    method = parse_contender(contender).method
    like_paper = method.kind.startswith("ngram") and method.count == 1
    measured = [task for task, one in counts.items() if len(one.margins)]
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


def _cells(found: _Counts, paper: dict[str, float]) -> list[Cell]:
    entries = _entries(found.outcomes)
    if not len(found.margins):
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


def _findings(run: StudyRun, contender: str, counts: Counts) -> list[Finding]:
    label = run.label(contender)
    wins, losses = counts[None].outcomes.wins, counts[None].outcomes.losses
    statements = [
        f"{label}: where refinement wins, it repairs repetition more often than where "
        "it loses.",
        f"{label}: where refinement wins, it repairs repetition more often than it "
        "introduces it.",
    ]
    if wins.repair is None or wins.regress is None or losses.repair is None:
        findings = [Finding(s, None, "Too few wins or losses.") for s in statements]
    else:
        findings = [
            Finding(
                statements[0],
                wins.repair > losses.repair,
                f"{100 * wins.repair:.1f} % of {wins.total} wins repair, "
                f"{100 * losses.repair:.1f} % of {losses.total} losses. In the paper "
                "on six of seven tasks.",
            ),
            Finding(
                statements[1],
                wins.repair > wins.regress,
                f"{100 * wins.repair:.1f} % of wins repair, {100 * wins.regress:.1f} % "
                "introduce. In the paper on six of seven tasks.",
            ),
        ]
    return [*findings, _weak_tasks(run, label, counts)]


def _weak_tasks(run: StudyRun, label: str, counts: Counts) -> Finding:
    statement = (
        f"{label}: the less BPD accepts on a task, the more refinement wins over what "
        "it loses."
    )
    shares = []
    for task, one in counts.items():
        if task is None:
            continue
        base, outcomes = efficiency(drafts_of(run, BPD, task)), one.outcomes
        if base is not None and outcomes.positions:
            margin = outcomes.wins.total - outcomes.losses.total
            shares.append((base, margin / outcomes.positions))
    fit = fit_line([x for x, _ in shares], [y for _, y in shares])
    if fit is None:
        return Finding(statement, None, "Too few tasks.")
    winning = sum(margin > 0 for _, margin in shares)
    return Finding(
        statement,
        fit.falls(),
        f"Rank correlation {fit.rank_correlation:.2f} (p = {fit.p_value:.2g}) over "
        f"{len(shares)} tasks, of "
        f"which {winning} win more than they lose. In the paper the four weakest of "
        "seven do.",
    )


STUDY = Study(
    "table5",
    "Wins and losses of refined drafts",
    "Table 5",
    "At how many positions of the texts do refined drafts yield more or fewer tokens "
    "than vanilla ones, and how often does that go with repaired repetition?",
    present,
)
