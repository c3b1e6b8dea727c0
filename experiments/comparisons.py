"""Tables and findings that compare contenders on each task."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bpd_jax.evaluation.efficiency import headroom_taken
from bpd_jax.evaluation.statistics import Fit, efficiency_test, fit_line, holm
from bpd_jax.reporting.exhibits import Cell, Column, Finding, Table
from bpd_jax.studies.claims import LEAST_RELIABILITY, Effect, judge
from bpd_jax.studies.results import Numbers, StudyRun
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.tables import (
    ALL,
    Entry,
    by_row,
    cell,
    counted,
    judged,
    missing_cell,
    table,
    verdict,
    with_interval,
)
from experiments import printed
from experiments.refinements import method_of

# Block efficiencies closer than this are equal up to rounding.
_EQUAL = 1e-9


def task_table(
    run: StudyRun, suffix: str, title: str, columns: Sequence[Entry], caption: str = ""
) -> Table:
    """A table with one row per task, and a summary row if there are several."""
    rows = run.rows("all")
    if len(run.tasks) < 2:
        del rows[ALL]
    return table(f"{run.study}{suffix}", title, "task", rows, columns, caption)


def efficiency_table(
    numbers: Numbers, contenders: Callable[[StudyRun], list[str]] | None = None
) -> Callable[[StudyRun], Table]:
    """Block efficiency of contenders, with bootstrap intervals over examples.

    Args:
      numbers: the paper's values by task and column.
      contenders: selects the contenders of a run to show; all by default.
    """

    def make_table(run: StudyRun) -> Table:
        def value(name: str, task: str | None) -> Cell:
            return run.drafts(name, task).cell(run.printed(numbers, name, task))

        names = contenders(run) if contenders else run.contenders
        means = [run.printed(numbers, name, ALL) for name in names]
        return task_table(
            run,
            "",
            "Block efficiency: tokens per serial call",
            [(Column(run.label(n)), functools.partial(value, n)) for n in names],
            "In the last row, our value is over all texts and the paper's is the mean "
            "over its seven tasks."
            if any(mean is not None for mean in means)
            else "",
        )

    return make_table


def length_notes(run: StudyRun) -> list[str]:
    """A note on drafts that are not as long as those of the paper's nine heads."""
    if run.block_size in (None, printed.HEADS):
        return []
    return [
        f"The drafts of this run have {run.block_size} tokens at most, those of the "
        f"paper's {printed.HEADS} heads {printed.HEADS}: the values for all heads are "
        "of different lengths."
    ]


def gain_table(numbers: Numbers) -> Callable[[StudyRun], Table]:
    """Gain over BPD in percent with paired intervals; a star marks p < 0.05."""

    def make_table(run: StudyRun) -> Table:
        refined = [name for name in run.contenders if name != BPD]

        def cells(task: str | None) -> list[Cell]:
            pairs = {name: run.paired([name, BPD], task) for name in refined}
            # The oracle gains by definition, so it is not tested.
            tested = {
                name: efficiency_test(*drafts.sums, *base.sums)
                for name, (drafts, base) in pairs.items()
                if drafts and not method_of(name).is_oracle
            }
            p_values = dict(zip(tested, holm([*tested.values()]), strict=True))
            paper_base = run.printed(numbers, BPD, task)
            row = []
            for name, (drafts, base) in pairs.items():
                paper_value = run.printed(numbers, name, task)
                paper_gain = None
                if paper_value and paper_base:
                    paper_gain = 100 * (paper_value / paper_base - 1)
                gain = drafts.gain(base, paper_gain)
                if p_values.get(name, 1) < 0.05:
                    gain = dataclasses.replace(gain, text="*")
                row.append(gain)
            return row

        return task_table(
            run,
            "_gain",
            "Gain in block efficiency over BPD",
            by_row([Column(run.label(n), digits=1, unit="+%") for n in refined], cells),
            "Paired bootstrap intervals over examples. * p < 0.05 in a paired "
            "permutation test, after Holm's correction for the contenders of a row.",
        )

    return make_table


def headroom_table(run: StudyRun) -> list[Table]:
    """Share of the oracle's headroom taken; an empty list without oracle or BPD."""
    oracle, names = run.oracle, run.contenders
    others = [n for n in names if n != BPD and not method_of(n).is_oracle]
    if oracle is None or BPD not in names or not others:
        return []

    def share(name: str, task: str | None) -> Cell:
        paired = run.paired([name, BPD, oracle], task)
        return headroom_cell(*(drafts.efficiency for drafts in paired))

    columns = [
        (Column(run.label(name), digits=0, unit="%"), functools.partial(share, name))
        for name in others
    ]
    return [
        task_table(
            run,
            "_headroom",
            "Share of the oracle's headroom taken",
            columns,
            f"(BE - BE of BPD) / (BE of {run.label(oracle)} - BE of BPD). Trees, and "
            "drafts with a larger k than the oracle's, can exceed 100 %.",
        )
    ]


def headroom_cell(
    efficiency: float | None,
    base: float | None,
    oracle: float | None,
    *,
    text: str = "no headroom",
) -> Cell:
    """Share of the oracle's headroom in percent; `text` if there is no headroom."""
    if efficiency is None:
        return missing_cell()
    share = None
    if base is not None and oracle is not None:
        share = headroom_taken(efficiency, base, oracle)
    return cell(share, scale=100, text=text)


def beats(run: StudyRun, statement: str, first: str, second: str) -> Finding:
    """Whether one contender beats another, by the interval of its gain."""
    drafts, base = run.paired([first, second])
    if not len(drafts):
        return judged(statement, "Not measured.")
    gain = drafts.gain(base)
    return Finding(
        statement,
        verdict(gain, len(drafts)),
        f"{drafts.efficiency:.3f} against {base.efficiency:.3f} tokens per call, "
        f"{with_interval(gain)} over {counted(len(drafts), 'text')}; "
        f"{drafts.checked:.1f} against {base.checked:.1f} draft tokens verified.",
    )


def never_below(
    run: StudyRun,
    statement: str,
    upper: Mapping[str, float],
    lower: Mapping[str, float],
    *,
    strictly: bool = False,
    mostly: bool = False,
) -> Finding:
    """Whether values of `upper` are at least those of `lower` on every task.

    Args:
      run: the run, which has the labels of tasks.
      statement: the paper's statement.
      upper, lower: values by task; see `StudyRun.by_task`.
      strictly: whether equal values contradict the statement.
      mostly: whether the statement holds if it does on more than half of the tasks.
    """
    tasks = [task for task in upper if task in lower]
    if not tasks:
        return judged(statement, "Not measured.")
    margins = {task: upper[task] - lower[task] for task in tasks}
    higher = [task for task in tasks if margins[task] > _EQUAL]
    equal = [task for task in tasks if abs(margins[task]) <= _EQUAL]
    holding = higher if strictly else [*higher, *equal]
    against = [run.task_label(task) for task in tasks if task not in holding]
    evidence = f"Higher on {len(higher)} of {len(tasks)} tasks"
    if equal:
        evidence += f", equal on {len(equal)}"
    ratios = [upper[task] / lower[task] for task in tasks if lower[task]]
    if ratios:
        evidence += f"; mean difference {100 * (np.mean(ratios) - 1):+.1f} %"
    evidence += "."
    if against:
        evidence += f" Not on {', '.join(against)}."
    holds = 2 * len(holding) > len(tasks) if mostly else not against
    return Finding(statement, holds, evidence)


def trend_finding(statement: str, effects: Sequence[Effect]) -> Finding:
    """Whether a trend over tasks holds, by the rule of claims."""
    if not effects:
        return judged(statement, "Too few tasks or texts.")
    [effect] = effects
    return Finding(
        statement,
        judge(effects),
        f"Rank correlation over the paper's tasks, between halves of their texts, "
        f"positive if the statement holds: {effect}; {effect.note} of the halves, of "
        f"which both must be {LEAST_RELIABILITY:g} or more.",
    )


def printed_trend(values: Mapping[str, float]) -> Fit:
    """Fits values of the paper, by task, to BPD's printed block efficiency."""
    base = printed.column(printed.TABLE4, BPD)
    fit = fit_line([base[task] for task in values], [*values.values()])
    assert fit is not None
    return fit
