"""Tables and findings that compare contenders task by task."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bpd_jax.evaluation.efficiency import headroom_taken
from bpd_jax.evaluation.entropy import fit_line
from bpd_jax.evaluation.significance import efficiency_test, holm
from bpd_jax.reporting.exhibits import Cell, Column, Finding, Table
from bpd_jax.studies import printed
from bpd_jax.studies.config import BPD
from bpd_jax.studies.printed import Numbers
from bpd_jax.studies.results import (
    ALL,
    MISSING,
    cell,
    drafts_of,
    efficiency,
    efficiency_cell,
    gain_cell,
    missing_cell,
    oracle_of,
    paired,
    paper_value,
    sums,
    task_rows,
    task_table,
)
from bpd_jax.studies.run_files import StudyRun

# Block efficiencies closer than this are equal: rounding of a share.
_EQUAL = 1e-9


def efficiency_table(
    run: StudyRun, name: str, contenders: Sequence[str], numbers: Numbers
) -> Table:
    """Block efficiency with bootstrap intervals over examples."""

    def entry(contender: str) -> Callable[[str | None], Cell]:
        return lambda task: efficiency_cell(
            drafts_of(run, contender, task), paper_value(run, numbers, contender, task)
        )

    printed_means = [paper_value(run, numbers, other, ALL) for other in contenders]
    return task_table(
        run,
        name,
        "Block efficiency: tokens per serial call",
        [(Column(run.label(other)), entry(other)) for other in contenders],
        "In the last row our value is over all texts, the paper's the mean of its "
        "seven tasks."
        if any(value is not None for value in printed_means)
        else "",
    )


def gain_table(
    run: StudyRun, name: str, contenders: Sequence[str], numbers: Numbers
) -> Table:
    """Gain over BPD in percent with paired intervals; a star where p < 0.05."""
    refined = [contender for contender in contenders if contender != BPD]

    def cells(task: str | None) -> list[Cell]:
        pairs = {name: paired(run, [name, BPD], task) for name in refined}
        # The oracle gains by definition, so it is not tested.
        tested = [n for n in refined if pairs[n][0] and not n.startswith("oracle")]
        p_values = holm([efficiency_test(*sums(a), *sums(b)) for a, b in
                         (pairs[n] for n in tested)])  # fmt: skip
        stars = {n: "*" for n, p in zip(tested, p_values, strict=True) if p < 0.05}
        plain = paper_value(run, numbers, BPD, task)
        found = []
        for contender, (mine, base) in pairs.items():
            theirs = paper_value(run, numbers, contender, task)
            paper = 100 * (theirs / plain - 1) if theirs and plain else None
            gain = gain_cell(mine, base, paper)
            text = stars.get(contender, "") if mine else MISSING
            found.append(Cell(gain.value, paper, gain.interval, text))
        return found

    columns = [Column(run.label(name), digits=1, unit="+%") for name in refined]
    return Table(
        name,
        "Gain in block efficiency over BPD",
        "task",
        columns,
        task_rows(run, cells),
        "Paired bootstrap intervals over examples. * p < 0.05 in a paired permutation "
        "test, after Holm's correction for the contenders of a row.",
    )


def headroom_table(run: StudyRun, name: str, contenders: Sequence[str]) -> list[Table]:
    """Share of the oracle's headroom taken; nothing without an oracle."""
    oracle = oracle_of(run)
    others = [c for c in contenders if c != BPD and not c.startswith("oracle")]
    if oracle is None or not others:
        return []

    def entry(contender: str) -> Callable[[str | None], Cell]:
        return lambda task: headroom_cell(
            *map(efficiency, paired(run, [contender, BPD, oracle], task))
        )

    columns = [(Column(run.label(c), digits=0, unit="%"), entry(c)) for c in others]
    return [
        task_table(
            run,
            name,
            "Share of the oracle's headroom taken",
            columns,
            f"(BE - BE of BPD) / (BE of {run.label(oracle)} - BE of BPD). Trees and "
            "drafts beyond the oracle's k can pass it.",
        )
    ]


def headroom_cell(
    mine: float | None,
    base: float | None,
    oracle: float | None,
    *,
    nothing: str = "no headroom",
) -> Cell:
    """Share of the oracle's headroom in percent; `nothing` where there is none."""
    if mine is None:
        return missing_cell()
    share = None
    if base is not None and oracle is not None:
        share = headroom_taken(mine, base, oracle)
    return cell(share, scale=100, text=nothing)


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
      run: for the names of tasks.
      statement: of the paper.
      upper, lower: values by task.
      strictly: whether equal ones speak against it.
      mostly: whether it is enough that it is so on more than half of the tasks.
    """
    tasks = [task for task in upper if task in lower]
    if not tasks:
        return Finding(statement, None, "Not measured.")
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


def weak_gain_most(
    statement: str, base: Mapping[str, float], refined: Mapping[str, float]
) -> Finding:
    """Whether tasks with a low `base` gain more: a negative rank correlation."""
    tasks = [task for task in base if task in refined]
    gains = [refined[task] / base[task] - 1 for task in tasks]
    fit = fit_line([base[task] for task in tasks], gains)
    if fit is None:
        return Finding(statement, None, "Too few tasks.")
    return Finding(
        statement,
        fit.falls(),
        f"Rank correlation of BPD's block efficiency and the gain over {len(tasks)} "
        f"tasks: {fit.rank_correlation:+.2f} (p = {fit.p_value:.2g}). Gains from "
        f"{100 * min(gains):+.1f} to "
        f"{100 * max(gains):+.1f} %.",
    )


def printed_trend(values: Mapping[str, float]) -> tuple[float, float]:
    """Rank correlation, and its p, of values with BPD's printed block efficiency."""
    base = printed.column(printed.TABLE4, BPD)
    fit = fit_line([base[task] for task in values], [*values.values()])
    assert fit is not None
    return fit.rank_correlation, fit.p_value
