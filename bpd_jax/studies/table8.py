"""Table 8: the weight alpha of rescorers, tuned on examples that are not reported."""

import re
from typing import NamedTuple

from bpd_jax.evaluation.alpha import Sums, Tuned, tune_alpha
from bpd_jax.evaluation.entropy import fit_line
from bpd_jax.evaluation.significance import efficiency_test, holm
from bpd_jax.reporting.exhibits import LINES, Cell, Chart, Column, Finding, Table
from bpd_jax.studies import printed
from bpd_jax.studies.comparisons import headroom_cell, printed_trend
from bpd_jax.studies.refinements import method_of
from bpd_jax.studies.results import ContenderDrafts, StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import BPD, parse_contender
from bpd_jax.studies.study_records import REPORT, TUNE
from bpd_jax.studies.tables import (
    by_row,
    correlation,
    counted,
    decimal,
    judged,
    line_of,
    missing_cell,
    table,
)

_HELD_OUT, _REPORTED = "tuned on held-out examples", "tuned on reported examples"
_COLUMNS = [
    Column("alpha", _HELD_OUT),
    Column("BE", _HELD_OUT),
    Column("over BPD", _HELD_OUT, digits=1, unit="+%"),
    Column("p", _HELD_OUT, digits=3),
    Column("of the oracle's headroom", _HELD_OUT, 0, "%"),
    Column("BE", "alpha = 1"),
    Column("alpha", _REPORTED),
    Column("BE", _REPORTED),
]

_PAPER_EXAMPLES = 100


class _Choice(NamedTuple):
    """One row: the tuned weights, and the reported drafts.

    Attributes:
      tuned: the weights that are best.
      examples: that were tuned on.
      report: reported drafts, by weight.
      base, oracle: those of BPD and of the oracle on the same examples.
    """

    tuned: Tuned
    examples: int
    report: dict[float, ContenderDrafts]
    base: ContenderDrafts
    oracle: ContenderDrafts

    @property
    def p_value(self) -> float:
        mine = self.report[self.tuned.alpha]
        return efficiency_test(*mine.sums, *self.base.sums) if len(self.base) else 1.0


class _Family(NamedTuple):
    """Contenders that differ in nothing but alpha.

    Attributes:
      run: of the study.
      name, label: of the family's table, and of its members without their alpha.
      paper: the paper's weights by task.
      choices: by task and `ALL`; None where examples are missing.
    """

    run: StudyRun
    name: str
    label: str
    paper: dict[str, float]
    choices: dict[str | None, _Choice | None]

    @property
    def of_tasks(self) -> list[_Choice]:
        """The choices of single tasks."""
        return [choice for task, choice in self.choices.items() if task and choice]


def _prepare(run: StudyRun) -> list[_Family]:
    """Families of two members at least.

    Worked example: `ngram:1:alpha=0.5@own` and `ngram:1:alpha=2@own` are the family
    `ngram:1@own`.
    """
    members: dict[str, dict[float, str]] = {}
    for name in run.contenders:
        contender = parse_contender(name)
        alpha = contender.method.setting("alpha")
        if alpha is not None:
            rest = contender.method.without("alpha").name
            suffix = "" if contender.assets is None else f"@{contender.assets}"
            members.setdefault(f"{rest}{suffix}", {})[alpha] = name
    families: list[_Family] = []
    for rest, unsorted in members.items():
        family = dict(sorted(unsorted.items()))
        if len(family) < 2:
            continue
        kind = "neural" if "neural" in method_of(rest).kind else "ngram"
        families.append(
            _Family(
                run,
                f"table8_{len(families) + 1}" if families else "table8",
                _label(run, rest, family[min(family)]),
                printed.column(printed.TABLE8, kind),
                {task: _choice(run, family, task) for task in run.rows()},
            )
        )
    return families


def _label(run: StudyRun, name: str, member: str) -> str:
    """The label of a family: its own, or that of a member without its alpha."""
    if name in run.facts.get("labels", {}) or run.label(member) == member:
        return run.label(name)
    label = re.sub(r"(, )?alpha [0-9.]+", "", run.label(member))
    return label.replace(" ()", "").replace("(, ", "(")


def _choice(
    run: StudyRun, family: dict[float, str], task: str | None
) -> _Choice | None:
    """Tunes on one task, or on all together; None where examples are missing."""
    others = [name for name in (BPD, run.oracle) if name in run.contenders and name]
    names = [*family.values()]
    tune = dict(zip(family, run.paired(names, task, TUNE), strict=True))
    drafts = run.paired([*names, *others], task, REPORT)
    report = dict(zip(family, drafts, strict=False))
    beside = dict(zip(others, drafts[len(family) :], strict=True))
    if not all(map(len, (*tune.values(), *report.values()))):
        return None
    tuned = tune_alpha(_sums(tune), _sums(report))
    base, oracle = (
        beside.get(name or "", ContenderDrafts([])) for name in (BPD, run.oracle)
    )
    return _Choice(tuned, len(tune[min(family)]), report, base, oracle)


def _sums(drafts: dict[float, ContenderDrafts]) -> Sums:
    totals = {a: [int(part.sum()) for part in d.sums] for a, d in drafts.items()}
    return {alpha: (tokens, calls) for alpha, (tokens, calls) in totals.items()}


def _tables(families: list[_Family]) -> list[Table]:
    return [_table(family) for family in families]


def _table(family: _Family) -> Table:
    measured = {task: choice for task, choice in family.choices.items() if choice}
    corrected = holm([choice.p_value for choice in measured.values()])
    p_values = dict(zip(measured, corrected, strict=True))

    def cells(task: str | None) -> list[Cell]:
        choice, paper = family.choices[task], family.paper.get(task or "")
        if choice is None:
            return [missing_cell(paper), *[missing_cell()] * len(_COLUMNS[1:])]
        tuned, report, base = choice.tuned, choice.report, choice.base
        mine, bound = report[tuned.alpha], choice.oracle
        headroom = headroom_cell(
            tuned.efficiency if len(base) and len(bound) else None,
            base.efficiency,
            bound.efficiency,
            nothing="none",
        )
        return [
            Cell(tuned.alpha, paper),
            mine.cell(),
            mine.gain(base),
            Cell(p_values[task]) if len(base) else missing_cell(),
            headroom,
            report.get(1.0, ContenderDrafts([])).cell(),
            Cell(tuned.habit_alpha),
            Cell(tuned.habit_efficiency),
        ]

    examples = [choice.examples for choice in family.of_tasks]
    caption = ""
    if examples:
        fewest, most = min(examples), max(examples)
        few = "" if fewest == most else f"{fewest} to "
        caption = (
            f"Tuned on {few}{counted(most, 'held-out example')} of each task; the "
            f"paper tunes on {_PAPER_EXAMPLES}."
        )
    return table(
        family.name,
        f"The weight alpha: {family.label}",
        "task",
        family.run.rows("All, one alpha"),
        by_row(_COLUMNS, cells),
        caption,
    )


def _charts(families: list[_Family]) -> list[Chart]:
    return [
        Chart(
            family.name,
            f"Block efficiency over alpha: {family.label}",
            LINES,
            "alpha",
            "tokens per call",
            [
                line_of(
                    family.run.task_label(task, "All"),
                    {a: Cell(d.efficiency) for a, d in choice.report.items() if a > 0},
                )
                for task, choice in family.choices.items()
                if choice is not None
            ],
            logarithmic=True,
        )
        for family in families
    ]


def _findings(families: list[_Family]) -> list[Finding]:
    return [
        judge(family)
        for family in families
        for judge in (_small_where_useless, _flattery)
    ]


def _small_where_useless(family: _Family) -> Finding:
    """The paper's text: little weight where rescoring does not help."""
    statement = (
        f"{family.label}: the better BPD does on a task, the less weight the rescorer "
        "gets."
    )
    points = [
        (base, choice.tuned.alpha)
        for choice in family.of_tasks
        if (base := choice.base.efficiency) is not None
    ]
    fit = fit_line([x for x, _ in points], [y for _, y in points])
    if fit is None:
        return judged(statement, "Too few tasks with different weights.")
    paper = " and ".join(
        f"{decimal(trend.rank_correlation)} for {model}"
        for column, model in (("neural", "the 94M model"), ("ngram", "4-grams"))
        for trend in [printed_trend(printed.column(printed.TABLE8, column))]
    )
    return Finding(
        statement,
        fit.falls(),
        f"Rank correlation of alpha with BPD's block efficiency over {len(points)} "
        f"tasks: {correlation(fit)}. In the paper {paper}.",
    )


def _flattery(family: _Family) -> Finding:
    """What tuning on the reported examples would have added."""
    statement = (
        f"{family.label}: tuning on held-out examples costs less than 1 % against "
        "tuning on those that are reported."
    )
    tuned = [choice.tuned for choice in family.of_tasks]
    if not tuned:
        return judged(statement, "No examples to tune on, or none to report.")
    costs = [100 * (t.habit_efficiency / t.efficiency - 1) for t in tuned]
    mean = sum(costs) / len(costs)
    return Finding(
        statement,
        mean < 1,
        f"{decimal(mean)} % on average over {counted(len(costs), 'task')}, at most "
        f"{decimal(max(costs))} %. This question is ours: the paper names two kinds "
        "of examples that it tunes on.",
    )


STUDY = Study(
    "table8",
    "The weight of the rescorer",
    "Table 8",
    "How much weight should a rescorer have beside the block heads, on which task, "
    "and how much does tuning gain?",
    prepare=_prepare,
    tables=[_tables],
    charts=[_charts],
    findings=[_findings],
    notes=[
        "Alpha is chosen for the highest block efficiency on examples that are "
        "reported nowhere; among equals the one nearest 1 is taken. The paper "
        "mentions an evaluation set in one place and held-out examples in another, so "
        "the result of tuning on the reported examples is shown too.",
        "At alpha = 0 the rescorer has no effect, and the draft is BPD's. The charts' "
        "axis is logarithmic and begins above it.",
        "p is of a permutation test that swaps methods within examples, tuned against "
        "BPD, after Holm's correction for the rows of a table.",
        "The paper tunes its 94M model and 4-grams alone, and takes their weights for "
        "the other rescorers of their class.",
    ],
)
