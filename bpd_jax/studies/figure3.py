"""Figure 3: the entropy of every head, and how block efficiency goes with it."""

import numpy as np

from bpd_jax.evaluation.entropy import Fit, fit_line, h_max
from bpd_jax.reporting.exhibits import (
    Cell,
    Chart,
    Column,
    Exhibit,
    Finding,
    Row,
    Series,
    Table,
)
from bpd_jax.studies import printed
from bpd_jax.studies.config import BPD, parse_contender
from bpd_jax.studies.records import DraftRecord
from bpd_jax.studies.results import (
    contenders_of,
    counted,
    decimal,
    drafts_of,
    efficiency,
    efficiency_cell,
    line_of,
    missing_cell,
    tasks_of,
)
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study

NOTES = [
    "Entropy is in nats, over every position of the texts. h_max is the number of the "
    "last head up to which it never falls; what scale entropy has does not matter.",
    "The paper does not say what the points of its Figure 3b are. Both readings are "
    "given: tasks with several numbers of heads each, where h_max is at most that "
    "number, and tasks with all heads.",
]

Points = list[tuple[str, int, float]]
"""Name, h_max and block efficiency."""


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws both panels from BPD's records."""
    entropies = {
        task: found
        for task in tasks_of(run)
        if (found := mean_entropy(drafts_of(run, BPD, task)))
    }
    heads = _numbers_of_heads(run, entropies)
    readings = {
        "tasks and numbers of heads": _points(run, entropies, heads),
        "tasks, all heads": _points(run, entropies, {max(heads): BPD} if heads else {}),
    }
    fits = {
        reading: fit_line([x for _, x, _ in points], [y for _, _, y in points])
        for reading, points in readings.items()
    }
    charts = [_entropy_chart(run, entropies)]
    for number, (reading, points) in enumerate(readings.items()):
        charts.append(_fit_chart(number, reading, points, fits[reading]))
    return study.show(
        run,
        tables=[_entropy_table(run, entropies), _fit_table(readings, fits)],
        charts=[chart for chart in charts if chart.series],
        findings=[
            _rises(run, entropies),
            _never_falls_on_lambada(run, entropies),
            _falls_somewhere(run, entropies),
            *(_correlates(reading, fits[reading]) for reading in readings),
        ],
        notes=[*NOTES, _vocabularies(run)],
    )


def mean_entropy(records: list[DraftRecord]) -> list[float]:
    """Mean entropy of heads 1 … L over all positions of some texts, in nats."""
    records = [record for record in records if record.head_entropy and record.tokens]
    if not records:
        return []
    weights = [record.tokens for record in records]
    values = [record.head_entropy for record in records]
    means: list[float] = np.average(values, axis=0, weights=weights).tolist()
    return means


def _numbers_of_heads(
    run: StudyRun, entropies: dict[str, list[float]]
) -> dict[int, str]:
    """Contenders that are BPD with its first heads, by their number."""
    longest = max(map(len, entropies.values()), default=0)
    found = {}
    for name in contenders_of(run):
        method = parse_contender(name).method
        if method.kind == BPD and set(dict(method.settings)) <= {"heads"}:
            found[method.setting("heads") or longest] = name
    return {heads: found[heads] for heads in sorted(found) if heads <= longest}


def _points(
    run: StudyRun, entropies: dict[str, list[float]], contenders: dict[int, str]
) -> Points:
    return [
        (f"{run.task_label(task)}, {heads} heads", h_max(found[:heads]), value)
        for task, found in entropies.items()
        for heads, contender in contenders.items()
        if (value := efficiency(drafts_of(run, contender, task))) is not None
    ]


def _entropy_table(run: StudyRun, entropies: dict[str, list[float]]) -> Table:
    size = max(map(len, entropies.values()), default=1)
    group = "entropy of head, nats"
    columns = [Column(str(head), group) for head in range(1, size + 1)]
    rows = []
    for task in tasks_of(run):
        cells = [missing_cell()] * (size + 1)
        if found := entropies.get(task):
            cells = [*map(Cell, found), Cell(float(h_max(found)))]
        paper = printed.TABLE10.get(task, {}).get("9")
        cells = [*cells, efficiency_cell(drafts_of(run, BPD, task), paper)]
        rows.append(Row(run.task_label(task), cells))
    return Table(
        "figure3",
        "How sure each head is, and block efficiency",
        "task",
        [*columns, Column("h_max", digits=0), Column("BE")],
        rows,
    )


def _fit_table(readings: dict[str, Points], fits: dict[str, Fit | None]) -> Table:
    columns = [
        Column("points", digits=0),
        Column("slope", "BE over h_max", digits=3),
        Column("intercept", "BE over h_max", digits=3),
        Column("R", "correlation"),
        Column("of ranks", "correlation"),
    ]
    rows = []
    for reading, points in readings.items():
        fit, count = fits[reading], Cell(float(len(points)))
        paper = printed.FIGURE3_CORRELATION
        if fit is None:
            nothing = missing_cell(text="too few points")
            cells = [count, nothing, nothing, missing_cell(paper, "-"), nothing]
        else:
            cells = [
                count,
                Cell(fit.slope),
                Cell(fit.intercept),
                Cell(fit.correlation, paper),
                Cell(fit.rank_correlation),
            ]
        rows.append(Row(reading, cells))
    title = "Linear regression of block efficiency on h_max"
    return Table("figure3_fit", title, "points", columns, rows)


def _entropy_chart(run: StudyRun, entropies: dict[str, list[float]]) -> Chart:
    return Chart(
        "figure3a",
        "Entropy of every head",
        "lines",
        "head",
        "mean entropy, nats",
        [
            line_of(run.task_label(task), dict(enumerate(found, start=1)))
            for task, found in entropies.items()
        ],
    )


def _fit_chart(number: int, reading: str, points: Points, fit: Fit | None) -> Chart:
    x = [float(place) for _, place, _ in points]
    y, names = [value for _, _, value in points], [name for name, _, _ in points]
    series = [Series(reading, x, y, names=names)] if points else []
    if fit is not None:
        line = {end: fit.intercept + fit.slope * end for end in (min(x), max(x))}
        label = f"fitted line, R = {decimal(fit.correlation)}"
        series.append(line_of(label, line, dashed=True))
    return Chart(
        "figure3b" if not number else f"figure3b_{number + 1}",
        f"Block efficiency over h_max: {reading}",
        "points",
        "h_max",
        "tokens per call",
        series,
    )


def _vocabularies(run: StudyRun) -> str:
    """What entropies of head 1 and of the others have to do with each other."""
    whole, draft = (run.facts.get(name) for name in ("vocabulary", "draft_vocabulary"))
    if whole is None or draft is None:
        return (
            "Head 1 chooses from the whole vocabulary. Heads 2 to L choose from the "
            "model's draft vocabulary, if it has one; with fewer tokens, entropies "
            "compare with head 1's only roughly."
        )
    if whole == draft:
        return f"All heads choose from the whole vocabulary of {whole:,} tokens."
    return (
        f"Head 1 chooses from the whole vocabulary of {whole:,} tokens, heads 2 to L "
        f"from a draft vocabulary of {draft:,}, so that their entropies compare "
        "with its only roughly."
    )


def _rises(run: StudyRun, entropies: dict[str, list[float]]) -> Finding:
    """By ranks, over all tasks: one dip between two heads does not decide it."""
    statement = (
        "The later a head, the higher its entropy, on most tasks and never less."
    )
    fits = {
        task: fit
        for task, found in entropies.items()
        if (fit := fit_line(range(1, len(found) + 1), found)) is not None
    }
    if not fits:
        return Finding(statement, None, "Not measured, or too few heads.")
    grows = sum(fit.grows() is True for fit in fits.values())
    falls = sum(fit.falls() is True for fit in fits.values())
    lowest = min(fits, key=lambda task: fits[task].rank_correlation)
    return Finding(
        statement,
        False if falls else True if 2 * grows > len(entropies) else None,
        f"By the rank correlation of entropy with the head's number, at 5 %, it grows "
        f"on {grows} of {counted(len(entropies), 'task')} and falls on {falls}. The "
        f"lowest is {decimal(fits[lowest].rank_correlation)}, of "
        f"{run.task_label(lowest)}.",
    )


def _never_falls_on_lambada(
    run: StudyRun, entropies: dict[str, list[float]]
) -> Finding:
    statement = (
        "On LAMBADA entropy falls from no head to the next: h_max is the number of "
        "heads."
    )
    found = entropies.get(printed.LAMBADA)
    if found is None:
        return Finding(statement, None, "LAMBADA was not measured.")
    return Finding(
        statement,
        h_max(found) == len(found),
        f"{_listed(found)} nats: the first fall comes after head {h_max(found)} of "
        f"{len(found)}."
        if h_max(found) < len(found)
        else f"{_listed(found)} nats.",
    )


def _falls_somewhere(run: StudyRun, entropies: dict[str, list[float]]) -> Finding:
    statement = "On other tasks entropy does fall from a head to the next."
    entropies = {t: found for t, found in entropies.items() if t != printed.LAMBADA}
    if not entropies:
        return Finding(statement, None, "Not measured.")
    falling = [
        f"{run.task_label(task)} (up to head {h_max(found)})"
        for task, found in entropies.items()
        if h_max(found) < len(found)
    ]
    evidence = f"On {len(falling)} of {counted(len(entropies), 'task')}"
    listed = f": {', '.join(falling)}" if falling else ""
    return Finding(statement, bool(falling), f"{evidence}{listed}.")


def _correlates(reading: str, fit: Fit | None) -> Finding:
    statement = f"Block efficiency grows with h_max ({reading})."
    if fit is None:
        return Finding(statement, None, "h_max is the same everywhere, or few points.")
    return Finding(
        statement,
        fit.grows(),
        f"R = {decimal(fit.correlation)}, of ranks {decimal(fit.rank_correlation)} "
        f"(p = {fit.p_value:.2g}); the paper prints R = "
        f"{printed.FIGURE3_CORRELATION}.",
    )


def _listed(values: list[float]) -> str:
    return ", ".join(map(decimal, values))


STUDY = Study(
    "figure3",
    "Entropy of the heads",
    "Figure 3",
    "Are later heads less sure of themselves, and does BPD accept more where entropy "
    "grows steadily from head to head?",
    present,
)
