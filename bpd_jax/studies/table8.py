"""Table 8: the weight alpha of rescorers, tuned on examples that are not reported."""

import dataclasses
import re
from collections.abc import Mapping

from bpd_jax.evaluation.alpha import Tuned, tune_alpha
from bpd_jax.evaluation.entropy import fit_line
from bpd_jax.evaluation.significance import efficiency_test, holm
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
from bpd_jax.studies.comparisons import headroom_cell, printed_trend
from bpd_jax.studies.config import BPD, parse_contender
from bpd_jax.studies.records import REPORT, TUNE, DraftRecord
from bpd_jax.studies.results import (
    contenders_of,
    counted,
    decimal,
    efficiency,
    efficiency_cell,
    gain_cell,
    line_of,
    missing_cell,
    oracle_of,
    paired,
    sums,
    task_name,
    tasks_of,
)
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study

NOTES = [
    "Alpha is chosen for the highest block efficiency on examples that are reported "
    "nowhere; among equals the one nearest 1 is taken. The paper speaks of an "
    "evaluation set in one place and of held-out examples in another: what tuning on "
    "the reported examples gives stands beside.",
    "At alpha = 0 the rescorer says nothing, and the draft is BPD's. The charts' axis "
    "is logarithmic and begins above it.",
    "p is of a permutation test that swaps methods within examples, tuned against BPD, "
    "after Holm's correction for the rows of a table.",
    "The paper tunes its 94M model and 4-grams alone, and takes their weights for the "
    "other rescorers of their class.",
]

_COLUMNS = [
    Column("alpha", "tuned on held-out examples"),
    Column("BE", "tuned on held-out examples"),
    Column("over BPD", "tuned on held-out examples", digits=1, unit="+%"),
    Column("p", "tuned on held-out examples", digits=3),
    Column("of the oracle's headroom", "tuned on held-out examples", 0, "%"),
    Column("BE", "alpha = 1"),
    Column("alpha", "tuned on what is reported"),
    Column("BE", "tuned on what is reported"),
]

_PAPER_EXAMPLES = 100

Family = Mapping[float, str]
"""Contenders that differ in nothing but alpha, by it, in ascending order."""

Drafts = dict[float, list[DraftRecord]]


@dataclasses.dataclass(frozen=True)
class _Choice:
    """One row: what was tuned, and the reported drafts it stands for.

    Attributes:
      tuned: the weights that are best.
      examples: that were tuned on.
      report: reported drafts, by weight.
      base, oracle: those of BPD and of the oracle on the same examples.
    """

    tuned: Tuned
    examples: int
    report: Drafts
    base: list[DraftRecord]
    oracle: list[DraftRecord]

    @property
    def p_value(self) -> float:
        mine = self.report[self.tuned.alpha]
        return efficiency_test(*sums(mine), *sums(self.base)) if self.base else 1.0


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws one table and one chart for every family of contenders."""
    tables, charts, findings = [], [], []
    for number, (rest, family) in enumerate(families(run).items()):
        label = _label(run, rest, family)
        rows: dict[str | None, _Choice | None] = {
            task: _choice(run, family, task) for task in [*tasks_of(run), None]
        }
        name = "table8" if not number else f"table8_{number + 1}"
        kind = parse_contender(family[min(family)]).method.kind
        column = "neural" if "neural" in kind else "ngram"
        tables.append(
            _table(run, name, label, rows, printed.column(printed.TABLE8, column))
        )
        charts.append(_chart(run, name, label, rows))
        findings += [_small_where_useless(label, rows), _flattery(label, rows)]
    return study.show(
        run,
        tables=tables,
        charts=charts,
        findings=findings,
        notes=NOTES,
    )


def families(run: StudyRun) -> dict[str, Family]:
    """Contenders that are equal but for alpha, two at least, under their name without.

    Worked example: `ngram:1:alpha=0.5@own` and `ngram:1:alpha=2@own` are the family
    `ngram:1@own`.
    """
    found: dict[str, dict[float, str]] = {}
    for name in contenders_of(run):
        contender = parse_contender(name)
        alpha = contender.method.setting("alpha")
        if alpha is not None:
            rest = contender.method.without("alpha").name
            suffix = "" if contender.assets is None else f"@{contender.assets}"
            found.setdefault(f"{rest}{suffix}", {})[alpha] = name
    return {
        name: {alpha: family[alpha] for alpha in sorted(family)}
        for name, family in found.items()
        if len(family) > 1
    }


def _label(run: StudyRun, name: str, family: Family) -> str:
    """That of a member, without its alpha."""
    member = family[min(family)]
    if name in run.facts.get("labels", {}) or run.label(member) == member:
        return run.label(name)
    label = re.sub(r"(, )?alpha [0-9.]+", "", run.label(member))
    return label.replace(" ()", "").replace("(, ", "(")


def _choice(run: StudyRun, family: Family, task: str | None) -> _Choice | None:
    """Tunes on one task, or on all together; None where examples are missing."""
    tune = dict(zip(family, paired(run, [*family.values()], task, TUNE), strict=True))
    oracle, recorded = oracle_of(run), contenders_of(run)
    others = [name for name in (BPD, oracle) if name in recorded and name]
    found = paired(run, [*family.values(), *others], task, REPORT)
    report = dict(zip(family, found, strict=False))
    beside = dict(zip(others, found[len(family) :], strict=True))
    if not all(tune.values()) or not all(report.values()):
        return None
    tuned = tune_alpha(_sums(tune), _sums(report))
    examples = len(tune[min(family)])
    base, bound = beside.get(BPD, []), beside.get(oracle or "", [])
    return _Choice(tuned, examples, report, base, bound)


def _sums(drafts: Drafts) -> dict[float, tuple[int, int]]:
    return {
        alpha: (int(tokens.sum()), int(calls.sum()))
        for alpha, records in drafts.items()
        for tokens, calls in [sums(records)]
    }


def _table(
    run: StudyRun,
    name: str,
    label: str,
    rows: dict[str | None, _Choice | None],
    paper: dict[str, float],
) -> Table:
    measured = {task: choice for task, choice in rows.items() if choice is not None}
    corrected = holm([choice.p_value for choice in measured.values()])
    p_values = dict(zip(measured, corrected, strict=True))
    return Table(
        name,
        f"The weight alpha: {label}",
        "task",
        _COLUMNS,
        [
            Row(
                task_name(run, task, "All, one alpha"),
                _cells(choice, p_values.get(task), paper.get(task or "")),
                strong=task is None,
            )
            for task, choice in rows.items()
        ],
        _tuned_on([choice.examples for task, choice in measured.items() if task]),
    )


def _tuned_on(examples: list[int]) -> str:
    """How many examples of each task were tuned on."""
    if not examples:
        return ""
    fewest, most = min(examples), max(examples)
    few = "" if fewest == most else f"{fewest} to "
    return (
        f"Tuned on {few}{counted(most, 'held-out example')} of each task; the paper "
        f"tunes on {_PAPER_EXAMPLES}."
    )


def _cells(
    choice: _Choice | None, p_value: float | None, paper: float | None
) -> list[Cell]:
    if choice is None:
        return [missing_cell(paper), *[missing_cell()] * len(_COLUMNS[1:])]
    tuned, report = choice.tuned, choice.report
    mine = report[tuned.alpha]
    return [
        Cell(tuned.alpha, paper),
        efficiency_cell(mine),
        gain_cell(mine, choice.base) if choice.base else missing_cell(),
        Cell(p_value) if choice.base else missing_cell(),
        headroom_cell(
            tuned.efficiency if choice.base and choice.oracle else None,
            efficiency(choice.base),
            efficiency(choice.oracle),
            nothing="none",
        ),
        efficiency_cell(report.get(1.0, [])),
        Cell(tuned.habit_alpha),
        Cell(tuned.habit_efficiency),
    ]


def _chart(
    run: StudyRun, name: str, label: str, rows: dict[str | None, _Choice | None]
) -> Chart:
    series = [
        line_of(
            task_name(run, task, "All"),
            {
                alpha: Cell(efficiency(drafts))
                for alpha, drafts in choice.report.items()
                if alpha > 0
            },
        )
        for task, choice in rows.items()
        if choice is not None
    ]
    return Chart(
        name,
        f"Block efficiency over alpha: {label}",
        "lines",
        "alpha",
        "tokens per call",
        series,
        logarithmic=True,
    )


def _small_where_useless(label: str, rows: dict[str | None, _Choice | None]) -> Finding:
    """The paper's text: little weight where rescoring does not help."""
    statement = (
        f"{label}: the better BPD does on a task, the less weight the rescorer gets."
    )
    points = [
        (base, choice.tuned.alpha)
        for task, choice in rows.items()
        if task and choice and (base := efficiency(choice.base)) is not None
    ]
    fit = fit_line([x for x, _ in points], [y for _, y in points])
    if fit is None:
        return Finding(statement, None, "Too few tasks with different weights.")
    return Finding(
        statement,
        fit.falls(),
        f"Rank correlation of alpha with BPD's block efficiency over {len(points)} "
        f"tasks: {decimal(fit.rank_correlation)} (p = {fit.p_value:.2g}). In the paper "
        f"{_paper_correlation()}.",
    )


def _paper_correlation() -> str:
    return " and ".join(
        f"{decimal(printed_trend(printed.column(printed.TABLE8, column))[0])} for {who}"
        for column, who in (("neural", "the 94M model"), ("ngram", "4-grams"))
    )


def _flattery(label: str, rows: dict[str | None, _Choice | None]) -> Finding:
    """What tuning on the reported examples would have added."""
    statement = (
        f"{label}: tuning on held-out examples costs less than 1 % against tuning on "
        "those that are reported."
    )
    chosen = [choice.tuned for task, choice in rows.items() if task and choice]
    if not chosen:
        return Finding(statement, None, "No examples to tune on, or none to report.")
    costs = [100 * (t.habit_efficiency / t.efficiency - 1) for t in chosen]
    mean = sum(costs) / len(costs)
    return Finding(
        statement,
        mean < 1,
        f"{decimal(mean)} % on average over {counted(len(costs), 'task')}, at most "
        f"{decimal(max(costs))} %. A question of ours: the paper names two "
        "kinds of examples that it tunes on.",
    )


STUDY = Study(
    "table8",
    "The weight of the rescorer",
    "Table 8",
    "How much should a rescorer's opinion weigh against the block heads' own, on which "
    "task, and what is tuning worth?",
    present,
)
