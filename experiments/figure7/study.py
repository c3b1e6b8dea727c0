"""Figure 7: block efficiency over the number of drafts p."""

import itertools

from bpd_jax.decoding.methods import Method
from bpd_jax.reporting.exhibits import LINES, Chart, Finding, line_of
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import parse_contender
from bpd_jax.studies.tables import ALL
from experiments.comparisons import efficiency_table, headroom_table
from experiments.refinements import method_of


def _families(run: StudyRun) -> list[list[str]]:
    """Groups of contenders that differ only in p, each in the order of p."""
    families: dict[tuple[Method, str | None], list[str]] = {}
    for name in run.contenders:
        contender = parse_contender(name)
        if contender.method.counts:
            family = contender.method.with_default_count, contender.assets
            families.setdefault(family, []).append(name)
    return [sorted(names, key=_drafts) for names in families.values()]


def _drafts(contender: str) -> int:
    return method_of(contender).count


def _label(run: StudyRun, family: list[str]) -> str:
    """The label of a family, without the number of drafts."""
    return run.label(family[0]).removeprefix(f"{_drafts(family[0])}-best ")


def _charts(run: StudyRun) -> list[Chart]:
    """A panel for all tasks together, and one for every task."""
    return [
        Chart(
            "figure7" if task is ALL else f"figure7_{task}",
            f"Drafts: {run.task_label(task, 'all tasks')}",
            LINES,
            "drafts p",
            "tokens per serial call",
            [
                line_of(
                    _label(run, family),
                    {_drafts(n): run.drafts(n, task).cell() for n in family},
                )
                for family in _families(run)
            ],
            logarithmic=True,
        )
        for task in [ALL, *run.tasks]
    ]


def _diminishing_returns(run: StudyRun, family: list[str]) -> Finding:
    statement = (
        "Block efficiency increases with p, with diminishing returns "
        f"({_label(run, family)})."
    )
    points = [
        (_drafts(name), value)
        for name, drafts in zip(family, run.paired(family), strict=True)
        if (value := drafts.efficiency) is not None
    ]
    if len(points) < 3:
        return Finding(statement, None, "Fewer than three values of p.")
    slopes = [(y2 - y) / (x2 - x) for (x, y), (x2, y2) in itertools.pairwise(points)]
    diminishing = all(b < a for a, b in itertools.pairwise(slopes))
    listed = ", ".join(f"{value:.3f} at p = {p}" for p, value in points)
    return Finding(
        statement, min(slopes) >= 0 and diminishing, f"Over all tasks {listed}."
    )


STUDY = Study(
    "figure7",
    "Block efficiency over the number of drafts",
    "Figure 7",
    "How does block efficiency depend on the number of drafts per serial call?",
    tables=[
        efficiency_table({}, lambda run: [n for f in _families(run) for n in f]),
        headroom_table,
    ],
    charts=[_charts],
    findings=[lambda run: [_diminishing_returns(run, f) for f in _families(run)]],
    notes=[
        "A tree that merges the common prefixes of p drafts verifies fewer tokens than "
        "p separate drafts, with the same block efficiency.",
    ],
)
