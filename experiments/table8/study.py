"""Table 8: the weight alpha of rescorers, tuned on held-out examples."""

import dataclasses
import re
from typing import NamedTuple

from bpd_jax.evaluation.efficiency import best_alpha
from bpd_jax.evaluation.statistics import efficiency_test, fit_line, holm
from bpd_jax.reporting.exhibits import (
    LINES,
    Cell,
    Chart,
    Column,
    Finding,
    Table,
    line_of,
)
from bpd_jax.studies.results import ContenderDrafts, StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import BPD, parse_contender
from bpd_jax.studies.study_records import PARTS, REPORT, TUNE
from bpd_jax.studies.tables import (
    ALL,
    by_row,
    correlation,
    counted,
    decimal,
    judged,
    missing_cell,
    table,
)
from experiments import printed
from experiments.comparisons import headroom_cell, printed_trend
from experiments.refinements import method_of

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
_MARK = (
    "* On the examples that it was tuned on, alpha = 0 yields more tokens per call: "
    "the draft is better without the rescorer. The paper's grid has no 0."
)


class _Choice(NamedTuple):
    """The weight of one row, and the reported drafts.

    Attributes:
      alpha: chosen on the tuning examples among those above 0.
      zero_wins: whether α = 0 is better on the tuning examples.
      examples: number of tuning examples.
      report: reported drafts, by weight.
      efficiencies: block efficiencies of `report`, by weight.
      base, oracle: drafts of BPD and of the oracle on the same examples.
    """

    alpha: float
    zero_wins: bool
    examples: int
    report: dict[float, ContenderDrafts]
    efficiencies: dict[float, float]
    base: ContenderDrafts
    oracle: ContenderDrafts

    @property
    def best(self) -> tuple[float, bool]:
        """The weight chosen on the reported examples, and whether α = 0 is better."""
        return _best(self.efficiencies)

    @property
    def p_value(self) -> float:
        drafts = self.report[self.alpha]
        return efficiency_test(*drafts.sums, *self.base.sums) if len(self.base) else 1.0


class _Family(NamedTuple):
    """Contenders that differ only in alpha.

    Attributes:
      name: name of the family's table.
      contender: a contender without alpha, such as `ngram:1@own`.
      label: label of its contenders, without alpha.
      paper: the paper's weights by task.
      choices: choices by task and `ALL`; None if examples are missing.
    """

    run: StudyRun
    name: str
    contender: str
    label: str
    paper: dict[str, float]
    choices: dict[str | None, _Choice | None]

    @property
    def of_tasks(self) -> list[_Choice]:
        """The choices of single tasks."""
        return [choice for task, choice in self.choices.items() if task and choice]


def _prepare(run: StudyRun) -> list[_Family]:
    """Returns the families of at least two contenders.

    Worked example: `ngram:1:alpha=0.5@own` and `ngram:1:alpha=2@own` are the family
    `ngram:1@own`.
    """
    members: dict[str, dict[float, str]] = {}
    for name in run.contenders:
        contender = parse_contender(name)
        alpha = contender.method.setting("alpha")
        if alpha is not None:
            rest = re.sub(r":alpha=[^:+/@]+", "", name)
            members.setdefault(rest, {})[alpha] = name
    families: list[_Family] = []
    for rest, unsorted in members.items():
        family = dict(sorted(unsorted.items()))
        if len(family) < 2:
            continue
        kind = "neural" if "neural" in method_of(rest).refiner_names else "ngram"
        families.append(
            _Family(
                run,
                f"table8_{len(families) + 1}" if families else "table8",
                rest,
                _label(run, rest, family[min(family)]),
                # The paper's weights are of one draft.
                printed.column(printed.TABLE8, kind)
                if method_of(rest).count == 1
                else {},
                {task: _choice(run, family, task) for task in run.rows()},
            )
        )
    return families


def _label(run: StudyRun, name: str, member: str) -> str:
    """The label of a family: a configured one, or that of a member without alpha."""
    if name in run.facts.get("labels", {}) or run.label(member) == member:
        return run.label(name)
    label = re.sub(r"(, )?alpha [0-9.]+", "", run.label(member))
    return label.replace(" ()", "").replace("(, ", "(")


def _choice(
    run: StudyRun, family: dict[float, str], task: str | None
) -> _Choice | None:
    """Tunes alpha on one task, or on `ALL`; None if examples are missing."""
    references = [name for name in (BPD, run.oracle) if name in run.contenders and name]
    names = [*family.values()]
    tune = dict(zip(family, run.paired(names, task, TUNE), strict=True))
    drafts = run.paired([*names, *references], task, REPORT)
    report = dict(zip(family, drafts, strict=False))
    by_reference = dict(zip(references, drafts[len(family) :], strict=True))
    if not all(map(len, (*tune.values(), *report.values()))):
        return None
    base, oracle = (
        by_reference.get(name or "", ContenderDrafts([])) for name in (BPD, run.oracle)
    )
    return _Choice(
        *_best(_efficiencies(tune)),
        len(tune[min(family)]),
        report,
        _efficiencies(report),
        base,
        oracle,
    )


def _best(efficiencies: dict[float, float]) -> tuple[float, bool]:
    """The best weight above 0, as in the paper's grid, and whether 0 is better."""
    grid = {alpha: value for alpha, value in efficiencies.items() if alpha > 0}
    best = best_alpha(grid)
    return best, efficiencies.get(0.0, 0.0) > grid[best]


def _efficiencies(drafts: dict[float, ContenderDrafts]) -> dict[float, float]:
    return {alpha: each.efficiency or 0.0 for alpha, each in drafts.items()}


def _table(family: _Family) -> Table:
    measured = {task: choice for task, choice in family.choices.items() if choice}
    corrected = holm([choice.p_value for choice in measured.values()])
    p_values = dict(zip(measured, corrected, strict=True))

    def cells(task: str | None) -> list[Cell]:
        choice, paper = family.choices[task], family.paper.get(task or "")
        if choice is None:
            return [missing_cell(paper), *[missing_cell()] * len(_COLUMNS[1:])]
        report, base, oracle = choice.report, choice.base, choice.oracle
        drafts, (best, best_is_zero) = report[choice.alpha], choice.best
        headroom = headroom_cell(
            drafts.efficiency if len(base) and len(oracle) else None,
            base.efficiency,
            oracle.efficiency,
            text="none",
        )
        return [
            Cell(choice.alpha, paper, text="*" * choice.zero_wins),
            drafts.cell(),
            drafts.gain(base),
            Cell(p_values[task]) if len(base) else missing_cell(),
            headroom,
            report.get(1.0, ContenderDrafts([])).cell(),
            Cell(best, text="*" * best_is_zero),
            Cell(choice.efficiencies[best]),
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
    if any(choice.zero_wins or choice.best[1] for choice in measured.values()):
        caption += f"{' ' * bool(caption)}{_MARK}"
    return table(
        family.name,
        f"The weight alpha: {family.label}",
        "task",
        family.run.rows("All, one alpha"),
        by_row(_COLUMNS, cells),
        caption,
    )


def _unrefined(family: _Family) -> str | None:
    """The contender with the search and the source of a family, unrefined."""
    plain = dataclasses.replace(method_of(family.contender), refiners=(), text="")
    others = family.run.contenders
    return next((name for name in others if method_of(name) == plain), None)


def _search_table(families: list[_Family]) -> list[Table]:
    """Every search with and without refinement, under the weight tuned for it."""
    rows = {
        number: (family, choice, name)
        for number, family in enumerate(families)
        if (choice := family.choices[ALL]) and (name := _unrefined(family))
    }

    def cells(number: int) -> list[Cell]:
        family, choice, name = rows[number]
        refined = choice.report[choice.alpha]
        plain = family.run.drafts(name)
        return [
            plain.cell(),
            Cell(plain.checked),
            Cell(choice.alpha),
            refined.cell(),
            Cell(refined.checked),
            refined.gain(plain),
        ]

    columns = [
        Column("BE", "unrefined"),
        Column("checked", "unrefined", digits=1),
        Column("alpha", "refined"),
        Column("BE", "refined"),
        Column("checked", "refined", digits=1),
        Column("gain", "refined", digits=1, unit="+%"),
    ]
    made = table(
        "table8_searches",
        "Searches under the weight that is tuned for each of them",
        "drafts",
        {number: family.label for number, (family, *_) in rows.items()},
        by_row(columns, cells),
        "One weight for all tasks, tuned on their held-out examples. `checked` counts "
        "the draft tokens that a serial call verifies. With the weight tuned for one "
        "draft, trees appear to lose by refinement.",
    )
    return [made] if rows else []


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


def _weight_decreases(family: _Family) -> Finding:
    """The paper's text: the weight is small where rescoring does not help."""
    statement = (
        f"{family.label}: the higher BPD's block efficiency on a task, the smaller the "
        "weight of the rescorer."
    )
    points = [
        (base, choice.alpha)
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


def _tuning_bias(family: _Family) -> Finding:
    """The additional gain of tuning on the reported examples."""
    statement = (
        f"{family.label}: tuning on held-out examples costs less than 1 % compared "
        "with tuning on the reported ones."
    )
    costs = [
        100 * (c.efficiencies[c.best[0]] / c.efficiencies[c.alpha] - 1)
        for c in family.of_tasks
    ]
    if not costs:
        return judged(statement, "No examples to tune on, or none to report.")
    mean = sum(costs) / len(costs)
    return Finding(
        statement,
        mean < 1,
        f"{decimal(mean)} % on average over {counted(len(costs), 'task')}, at most "
        f"{decimal(max(costs))} %. The paper does not state this.",
    )


STUDY = Study(
    "table8",
    "The weight of the rescorer",
    "Table 8",
    "How much weight should a rescorer have relative to the block heads on each task, "
    "and how much does tuning gain?",
    example_parts=PARTS,
    prepare=_prepare,
    tables=[lambda families: list(map(_table, families)), _search_table],
    charts=[_charts],
    findings=[
        lambda families: [
            judge(family)
            for family in families
            for judge in (_weight_decreases, _tuning_bias)
        ]
    ],
    notes=[
        "Alpha maximises block efficiency on held-out examples among the values that "
        "the paper prints, 0.1 to 10; among equal values, the one nearest to 1 is "
        "chosen. For comparison, the result of tuning on the reported examples is "
        "shown as well.",
        "At alpha = 0 the rescorer has no effect, and the draft is BPD's; cells where "
        "this would win are marked. The charts have a logarithmic axis and omit this "
        "value.",
        "p-values are from a permutation test that swaps the tuned method and BPD "
        "within examples, after Holm's correction for the rows of a table.",
        "The paper tunes only its 94M model and 4-grams, and uses their weights for "
        "the other rescorers of their class.",
    ],
)
