"""Figure 7: block efficiency over the number of drafts p."""

import itertools

from bpd_jax.reporting.exhibits import Chart, Exhibit, Finding
from bpd_jax.studies.comparisons import efficiency_table, headroom_table
from bpd_jax.studies.refinements import method_of
from bpd_jax.studies.results import (
    ALL,
    contenders_of,
    drafts_of,
    efficiency,
    efficiency_cell,
    line_of,
    task_name,
    tasks_of,
)
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study

NOTES = [
    "A tree that merges p drafts by their common prefixes checks fewer tokens than p "
    "drafts side by side; the block efficiency is the same.",
]


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws a panel for every task and one for all."""
    families = _families(run)
    tasks: list[str | None] = [ALL, *tasks_of(run)]
    contenders = [name for family in families.values() for name in family]
    return study.show(
        run,
        tables=[
            efficiency_table(run, "figure7", contenders, {}),
            *headroom_table(run, "figure7_headroom", contenders),
        ],
        charts=[_chart(run, families, task) for task in tasks],
        findings=[_falling(run, family) for family in families.values()],
        notes=NOTES,
    )


def _families(run: StudyRun) -> dict[str, list[str]]:
    """Contenders that differ in p alone, by p."""
    families: dict[str, list[str]] = {}
    for name in contenders_of(run):
        method = method_of(name)
        if method.counts:
            base = name.replace(f"{method.kind}:{method.count}", method.kind, 1)
            families.setdefault(base, []).append(name)
    for family in families.values():
        family.sort(key=lambda name: method_of(name).count)
    return families


def _family_label(run: StudyRun, family: list[str]) -> str:
    """The label without the number of drafts."""
    best = f"{method_of(family[0]).count}-best "
    return run.label(family[0]).removeprefix(best)


def _chart(run: StudyRun, families: dict[str, list[str]], task: str | None) -> Chart:
    series = [
        line_of(
            _family_label(run, family),
            {
                method_of(name).count: efficiency_cell(drafts_of(run, name, task))
                for name in family
            },
        )
        for family in families.values()
    ]
    title = f"Drafts: {task_name(run, task, 'all tasks')}"
    name = "figure7" if task is ALL else f"figure7_{task}"
    return Chart(
        name,
        title,
        "lines",
        "drafts p",
        "tokens per serial call",
        series,
        logarithmic=True,
    )


def _falling(run: StudyRun, family: list[str]) -> Finding:
    statement = (
        f"Block efficiency grows with p, less and less ({_family_label(run, family)})."
    )
    points = [
        (method_of(name).count, found)
        for name in family
        if (found := efficiency(drafts_of(run, name))) is not None
    ]
    if len(points) < 3:
        return Finding(statement, None, "Fewer than three values of p.")
    slopes = [
        (after[1] - before[1]) / (after[0] - before[0])
        for before, after in itertools.pairwise(points)
    ]
    words = ", ".join(f"{value:.3f} at p = {p}" for p, value in points)
    falling = all(b < a for a, b in itertools.pairwise(slopes))
    holds = min(slopes) >= 0 and falling
    return Finding(statement, holds, f"Over all tasks {words}.")


STUDY = Study(
    "figure7",
    "Block efficiency over the number of drafts",
    "Figure 7",
    "What do more drafts per serial call bring?",
    present,
)
