"""Table 3: how much drafts repeat themselves, before and after refinement."""

from bpd_jax.reporting.exhibits import (
    Cell,
    Chart,
    Column,
    Exhibit,
    Finding,
    Series,
    Table,
)
from bpd_jax.studies.config import BPD
from bpd_jax.studies.efficiency_table import rows_of_tasks
from bpd_jax.studies.pairing import contenders_of
from bpd_jax.studies.printed import TABLE3
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.summary import drafts_of, repetition_of, tasks_of

NOTES = [
    "Over the best-ranked draft of every serial call: share of neighbours that are the "
    "same token, and mean longest run of one token (paper section 6.1).",
    "The paper's text speaks of reductions of 9.9 to 24.5 points; by its table SQuAD's "
    "is 7.9 and LAMBADA's 9.3.",
]


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws one table, and a finding for every refined contender."""
    contenders = [BPD, *(name for name in contenders_of(run) if name != BPD)]
    refined = contenders[1:]
    shares = {name: _shares(run, name) for name in contenders}
    return study.show(
        run,
        tables=[_table(run, contenders)],
        charts=[_chart(run, contenders, shares)],
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


def _table(run: StudyRun, contenders: list[str]) -> Table:
    printed = run.facts.get("printed", {})

    def cells(task: str | None) -> list[Cell]:
        numbers = TABLE3.get(task or "", {})
        shares, runs = [], []
        for name in contenders:
            share, longest = repetition_of(drafts_of(run, name, task))
            when = "before" if name == BPD else printed.get(name, "")
            paper = numbers.get(f"repeated_{when}"), numbers.get(f"run_{when}")
            if share is None or longest is None:
                shares.append(Cell(paper=paper[0], text="not measured"))
                runs.append(Cell(paper=paper[1], text="not measured"))
            else:
                shares.append(Cell(100 * share, paper[0]))
                runs.append(Cell(longest, paper[1]))
        return [*shares, *runs]

    labels = [run.label(name) for name in contenders]
    return Table(
        "table3",
        "Repetition in drafts",
        "task",
        [
            *(Column(label, "equal neighbours", 1, "%") for label in labels),
            *(Column(label, "mean longest run", 2) for label in labels),
        ],
        rows_of_tasks(run, cells),
    )


def _chart(
    run: StudyRun, contenders: list[str], shares: dict[str, dict[str, float]]
) -> Chart:
    tasks = [task for task in tasks_of(run) if any(task in s for s in shares.values())]
    series = [
        Series(
            run.label(name),
            [float(i) for i, task in enumerate(tasks) if task in shares[name]],
            [shares[name][task] for task in tasks if task in shares[name]],
        )
        for name in contenders
    ]
    return Chart(
        "table3",
        "Equal neighbours in drafts",
        "bars",
        "task",
        "% of neighbours",
        series,
        categories=[run.task_label(task) for task in tasks],
    )


STUDY = Study(
    "table3",
    "Repetition in drafts",
    "Table 3",
    "Heads that guess independently say the same token twice. How often, and how often "
    "still once a 2-gram model has chosen among their candidates?",
    present,
)
