"""Table 3: how much drafts repeat themselves, before and after refinement."""

from collections.abc import Callable

from bpd_jax.reporting.exhibits import BARS, Cell, Chart, Column, Exhibit, Finding
from bpd_jax.studies.config import BPD
from bpd_jax.studies.printed import TABLE3
from bpd_jax.studies.results import (
    cell,
    contenders_of,
    drafts_of,
    line_of,
    repetition_of,
    task_table,
    tasks_of,
)
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study

NOTES = [
    "Over the best-ranked draft of every serial call: share of neighbours that are the "
    "same token, and mean longest run of one token (paper section 6.1).",
    "The paper's text speaks of reductions of 9.9 to 24.5 points; by its table SQuAD's "
    "is 7.9 and LAMBADA's 9.3.",
]


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws one table, and a finding for every refined contender."""
    refined = [name for name in contenders_of(run) if name != BPD]
    contenders = [BPD, *refined]
    shares = {name: _shares(run, name) for name in contenders}

    def column(part: int, name: str, scale: float) -> Callable[[str | None], Cell]:
        when = "before" if name == BPD else run.facts.get("printed", {}).get(name, "")
        key = f"{('repeated', 'run')[part]}_{when}"
        return lambda task: cell(
            repetition_of(drafts_of(run, name, task))[part],
            TABLE3.get(task or "", {}).get(key),
            scale=scale,
        )

    groups = (("equal neighbours", 1, "%", 100), ("mean longest run", 2, "", 1))
    columns = [
        (Column(run.label(name), group, digits, unit), column(part, name, scale))
        for part, (group, digits, unit, scale) in enumerate(groups)
        for name in contenders
    ]
    tasks = [task for task in tasks_of(run) if any(task in s for s in shares.values())]
    bars = [
        line_of(
            run.label(name),
            {i: values[task] for i, task in enumerate(tasks) if task in values},
        )
        for name, values in shares.items()
    ]
    chart = Chart(
        "table3",
        "Equal neighbours in drafts",
        BARS,
        "task",
        "% of neighbours",
        bars,
        categories=[run.task_label(task) for task in tasks],
    )
    return study.show(
        run,
        tables=[task_table(run, "table3", "Repetition in drafts", columns)],
        charts=[chart],
        findings=[_falls(run, shares[BPD], shares[name], name) for name in refined],
        notes=NOTES,
    )


def _shares(run: StudyRun, contender: str) -> dict[str, float]:
    """Percent of equal neighbours by task."""
    found = {
        task: repetition_of(drafts_of(run, contender, task))[0]
        for task in tasks_of(run)
    }
    return {task: 100 * share for task, share in found.items() if share is not None}


def _falls(
    run: StudyRun, before: dict[str, float], after: dict[str, float], contender: str
) -> Finding:
    statement = f"Repetition falls after refinement ({run.label(contender)})."
    tasks = [task for task in before if task in after]
    if not tasks:
        return Finding(statement, None, "Not measured.")
    against = [run.task_label(task) for task in tasks if after[task] >= before[task]]
    falls = [before[task] - after[task] for task in tasks]
    evidence = (
        f"On {len(tasks) - len(against)} of {len(tasks)} tasks; by "
        f"{sum(falls) / len(falls):.1f} points on average."
    )
    if against:
        evidence += f" Not on {', '.join(against)}."
    return Finding(statement, not against, evidence)


STUDY = Study(
    "table3",
    "Repetition in drafts",
    "Table 3",
    "Heads that guess independently say the same token twice. How often, and how often "
    "still once a 2-gram model has chosen among their candidates?",
    present,
)
