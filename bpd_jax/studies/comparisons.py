"""Findings that compare contenders task by task."""

from collections.abc import Mapping

import numpy as np

from bpd_jax.evaluation.entropy import fit_line
from bpd_jax.reporting.exhibits import Finding
from bpd_jax.studies.run_files import StudyRun

# Block efficiencies closer than this are equal: rounding of a share.
_EQUAL = 1e-9


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
