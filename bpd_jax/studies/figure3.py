"""Figure 3: the entropy of every head, and how block efficiency goes with it."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from bpd_jax.evaluation.entropy import Fit, fit_line, h_max
from bpd_jax.reporting.exhibits import (
    LINES,
    POINTS,
    Cell,
    Chart,
    Column,
    Finding,
    Series,
    Table,
)
from bpd_jax.studies import printed
from bpd_jax.studies.refinements import method_of
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.study_records import DraftRecord
from bpd_jax.studies.tables import (
    Judgement,
    by_row,
    correlation,
    counted,
    decimal,
    finding,
    judged,
    line_of,
    missing_cell,
    table,
)


@dataclasses.dataclass(frozen=True)
class _Reading:
    """The points of Figure 3b in one of its readings.

    Attributes:
      name: of the reading.
      points: label, h_max and block efficiency of each.
      fit: the line through them.
    """

    name: str
    points: list[tuple[str, int, float]]
    fit: Fit | None


@dataclasses.dataclass(frozen=True)
class _Entropies:
    """Mean entropies of heads 1 … L by task, and block efficiency over h_max."""

    run: StudyRun
    by_task: dict[str, list[float]]
    readings: list[_Reading]


def _prepare(run: StudyRun) -> _Entropies:
    means = {task: mean_entropy(run.drafts(BPD, task)) for task in run.tasks}
    by_task = {task: values for task, values in means.items() if values}
    heads = _numbers_of_heads(run, by_task)
    readings = []
    for name, contenders in (
        ("tasks and numbers of heads", heads),
        ("tasks, all heads", {max(heads): BPD} if heads else {}),
    ):
        points = [
            (f"{run.task_label(task)}, {count} heads", h_max(values[:count]), value)
            for task, values in by_task.items()
            for count, contender in contenders.items()
            if (value := run.drafts(contender, task).efficiency) is not None
        ]
        fit = fit_line([x for _, x, _ in points], [y for _, _, y in points])
        readings.append(_Reading(name, points, fit))
    return _Entropies(run, by_task, readings)


def mean_entropy(drafts: Iterable[DraftRecord]) -> list[float]:
    """Mean entropy of heads 1 … L over all positions of some texts, in nats."""
    records = [record for record in drafts if record.head_entropy and record.tokens]
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
    numbers = {}
    for name in run.contenders:
        method = method_of(name)
        if method.kind == BPD and set(dict(method.settings)) <= {"heads"}:
            numbers[method.setting("heads") or longest] = name
    return {heads: numbers[heads] for heads in sorted(numbers) if heads <= longest}


def _entropy_table(data: _Entropies) -> Table:
    run, size = data.run, max(map(len, data.by_task.values()), default=1)

    def cells(task: str) -> list[Cell]:
        values = data.by_task.get(task)
        row = [missing_cell()] * (size + 1)
        if values:
            row = [*map(Cell, values), Cell(float(h_max(values)))]
        paper = printed.TABLE10.get(task, {}).get("9")
        return [*row, run.drafts(BPD, task).cell(paper)]

    group = "entropy of head, nats"
    columns = [Column(str(head), group) for head in range(1, size + 1)]
    columns += [Column("h_max", digits=0), Column("BE")]
    return table(
        "figure3",
        "Entropy of each head, and block efficiency",
        "task",
        {task: run.task_label(task) for task in run.tasks},
        by_row(columns, cells),
    )


def _fit_table(data: _Entropies) -> Table:
    def cells(number: int) -> list[Cell]:
        reading, paper = data.readings[number], printed.FIGURE3_CORRELATION
        fit, count = reading.fit, Cell(float(len(reading.points)))
        if fit is None:
            nothing = missing_cell(text="too few points")
            return [count, nothing, nothing, missing_cell(paper, "-"), nothing]
        values = map(Cell, (fit.slope, fit.intercept))
        ranks = Cell(fit.rank_correlation)
        return [count, *values, Cell(fit.correlation, paper), ranks]

    columns = [
        Column("points", digits=0),
        Column("slope", "BE over h_max", digits=3),
        Column("intercept", "BE over h_max", digits=3),
        Column("R", "correlation"),
        Column("of ranks", "correlation"),
    ]
    rows = {number: reading.name for number, reading in enumerate(data.readings)}
    title = "Linear regression of block efficiency on h_max"
    return table("figure3_fit", title, "points", rows, by_row(columns, cells))


def _charts(data: _Entropies) -> list[Chart]:
    """Both panels; those without a point are left out."""
    entropies = Chart(
        "figure3a",
        "Entropy of every head",
        LINES,
        "head",
        "mean entropy, nats",
        [
            line_of(data.run.task_label(task), dict(enumerate(values, start=1)))
            for task, values in data.by_task.items()
        ],
    )
    charts = [entropies, *map(_fit_chart, ("figure3b", "figure3b_2"), data.readings)]
    return [chart for chart in charts if chart.series]


def _fit_chart(name: str, reading: _Reading) -> Chart:
    x = [float(place) for _, place, _ in reading.points]
    y, names = (
        [y for _, _, y in reading.points],
        [name for name, _, _ in reading.points],
    )
    series = [Series(reading.name, x, y, names=names)] if x else []
    if (fit := reading.fit) is not None:
        line = {end: fit.intercept + fit.slope * end for end in (min(x), max(x))}
        label = f"fitted line, R = {decimal(fit.correlation)}"
        series.append(line_of(label, line, dashed=True))
    title = f"Block efficiency over h_max: {reading.name}"
    return Chart(name, title, POINTS, "h_max", "tokens per call", series)


def _vocabularies(data: _Entropies) -> str:
    """Whether the entropies of head 1 and of the others can be compared."""
    facts = data.run.facts
    whole, draft = (facts.get(name) for name in ("vocabulary", "draft_vocabulary"))
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


@finding(
    "The later a head, the higher its entropy: it grows on most tasks and falls on "
    "none."
)
def _rises(data: _Entropies) -> Judgement | str:
    """By ranks, over all tasks: one dip between two heads does not decide it."""
    entropies = data.by_task
    fits = {
        task: fit
        for task, values in entropies.items()
        if (fit := fit_line(range(1, len(values) + 1), values)) is not None
    }
    if not fits:
        return "Not measured, or too few heads."
    grows = sum(fit.grows() is True for fit in fits.values())
    falls = sum(fit.falls() is True for fit in fits.values())
    lowest = min(fits, key=lambda task: fits[task].rank_correlation)
    return (
        False if falls else True if 2 * grows > len(entropies) else None,
        f"By the rank correlation of entropy with the head's number, at 5 %, it grows "
        f"on {grows} of {counted(len(entropies), 'task')} and falls on {falls}. The "
        f"lowest is {decimal(fits[lowest].rank_correlation)}, of "
        f"{data.run.task_label(lowest)}.",
    )


@finding(
    "On LAMBADA entropy never falls from one head to the next: h_max is the number of "
    "heads."
)
def _never_falls_on_lambada(data: _Entropies) -> Judgement | str:
    values = data.by_task.get(printed.LAMBADA)
    if values is None:
        return "LAMBADA was not measured."
    last, evidence = h_max(values), f"{', '.join(map(decimal, values))} nats"
    if last < len(values):
        evidence += f": the first fall comes after head {last} of {len(values)}"
    return last == len(values), f"{evidence}."


@finding("On other tasks entropy falls from some head to the next.")
def _falls_somewhere(data: _Entropies) -> Judgement | str:
    last = {t: h_max(v) for t, v in data.by_task.items() if t != printed.LAMBADA}
    if not last:
        return "Not measured."
    falling = [
        f"{data.run.task_label(task)} (up to head {head})"
        for task, head in last.items()
        if head < len(data.by_task[task])
    ]
    evidence = f"On {len(falling)} of {counted(len(last), 'task')}"
    listed = f": {', '.join(falling)}" if falling else ""
    return bool(falling), f"{evidence}{listed}."


def _correlates(data: _Entropies) -> list[Finding]:
    findings = []
    for reading in data.readings:
        holds, evidence = None, "h_max is the same everywhere, or few points."
        if (fit := reading.fit) is not None:
            holds = fit.grows()
            evidence = (
                f"R = {decimal(fit.correlation)}, of ranks {correlation(fit)}; the "
                f"paper prints R = {printed.FIGURE3_CORRELATION}."
            )
        statement = f"Block efficiency grows with h_max ({reading.name})."
        findings.append(judged(statement, (holds, evidence)))
    return findings


STUDY = Study(
    "figure3",
    "Entropy of the heads",
    "Figure 3",
    "Are later heads less certain, and does BPD accept more tokens where entropy "
    "grows steadily from head to head?",
    prepare=_prepare,
    tables=[_entropy_table, _fit_table],
    charts=[_charts],
    findings=[_rises, _never_falls_on_lambada, _falls_somewhere, _correlates],
    notes=[
        "Entropy is in nats, over every position of the texts. h_max is the number of "
        "the last head up to which it never falls; the scale of entropy does not "
        "matter.",
        "The paper does not define the points of its Figure 3b. Both interpretations "
        "are shown: tasks with several numbers of heads each, where h_max is at most "
        "that number, and tasks with all heads.",
        _vocabularies,
    ],
)
