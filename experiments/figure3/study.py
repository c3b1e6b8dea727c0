"""Figure 3: the entropy of each head, and its relation to block efficiency."""

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from bpd_jax.evaluation.statistics import Fit, fit_line, h_max
from bpd_jax.reporting.exhibits import (
    LINES,
    POINTS,
    Cell,
    Chart,
    Column,
    Finding,
    Series,
    Table,
    line_of,
)
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.study_records import ENTROPY_BIN, DraftRecord, from_digits
from bpd_jax.studies.tables import (
    Judgement,
    by_row,
    correlation,
    counted,
    decimal,
    finding,
    judged,
    missing_cell,
    table,
)
from experiments import printed
from experiments.refinements import bpd_by_heads

_NOT_COMPARABLE = (
    "Not judged: head 1 predicts over more tokens than the others, so that its entropy "
    "cannot be compared with theirs."
)


@dataclasses.dataclass(frozen=True)
class _Interpretation:
    """The points of Figure 3b in one interpretation.

    Attributes:
      name: name of the interpretation.
      points: label, h_max and block efficiency of each point.
      fit: the fitted line.
      independent: whether each point is of a different task, as a p-value requires.
    """

    name: str
    points: list[tuple[str, int, float]]
    fit: Fit | None
    independent: bool


@dataclasses.dataclass(frozen=True)
class _Entropies:
    """Mean entropies of heads 1 … L by task, and block efficiency over h_max.

    Attributes:
      by_task: mean entropies of a task's heads, in nats.
      interpretations: the points of Figure 3b.
    """

    run: StudyRun
    by_task: dict[str, list[float]]
    interpretations: list[_Interpretation]

    @property
    def comparable(self) -> bool:
        """Whether head 1 predicts over the same tokens as the others.

        An entropy over more tokens is larger, so that with a draft vocabulary a
        decrease from head 1 to head 2, and with it h_max, may be an artefact.
        """
        first, draft, _ = _sizes(self.run)
        return first == draft

    @property
    def first(self) -> int:
        """The first head whose entropy can be compared with the next one's."""
        return 1 if self.comparable else 2


def _sizes(run: StudyRun) -> tuple[int | None, ...]:
    """Numbers of tokens of head 1's entropy, of the others', and of the vocabulary."""
    full, draft = (run.facts.get(name) for name in ("vocabulary", "draft_vocabulary"))
    return run.facts.get("entropy_vocabulary", full), draft, full


def _prepare(run: StudyRun) -> _Entropies:
    means = {task: mean_entropy(run.drafts(BPD, task)) for task in run.tasks}
    by_task = {task: values for task, values in means.items() if values}
    # The contenders that are BPD with its first heads, by the number of heads.
    longest = max(map(len, by_task.values()), default=0)
    numbers = {h or longest: name for h, name in bpd_by_heads(run.contenders).items()}
    heads = {h: numbers[h] for h in sorted(numbers) if h <= longest}
    interpretations = []
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
        interpretations.append(_Interpretation(name, points, fit, len(contenders) < 2))
    return _Entropies(run, by_task, interpretations)


def mean_entropy(drafts: Iterable[DraftRecord]) -> list[float]:
    """Mean entropy of heads 1 … L over all positions of the texts, in nats."""
    records = [record for record in drafts if record.head_entropy and record.tokens]
    if not records:
        return []
    weights = [record.tokens for record in records]
    values = [record.head_entropy for record in records]
    means: list[float] = np.average(values, axis=0, weights=weights).tolist()
    return means


def _entropy_table(data: _Entropies) -> Table:
    run, size = data.run, max(map(len, data.by_task.values()), default=1)

    def cells(task: str) -> list[Cell]:
        values = data.by_task.get(task)
        row = [missing_cell()] * (size + 1)
        if values:
            last = Cell(float(h_max(values)))
            row = [*map(Cell, values), last if data.comparable else Cell(text="-")]
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
        interpretation = data.interpretations[number]
        paper = printed.FIGURE3_CORRELATION
        fit, count = interpretation.fit, Cell(float(len(interpretation.points)))
        if fit is None or not data.comparable:
            why = "too few points" if data.comparable else "not comparable"
            missing = missing_cell(text=why)
            return [count, missing, missing, missing_cell(paper, "-"), missing]
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
    rows = {n: each.name for n, each in enumerate(data.interpretations)}
    title = "Linear regression of block efficiency on h_max"
    return table("figure3_fit", title, "points", rows, by_row(columns, cells))


def _charts(data: _Entropies) -> list[Chart]:
    """All panels that have a point."""
    means = Chart(
        "figure3_means",
        "Mean entropy of each head",
        LINES,
        "head",
        "mean entropy, nats",
        [
            line_of(data.run.task_label(task), dict(enumerate(values, start=1)))
            for task, values in data.by_task.items()
        ],
    )
    fits = map(_fit_chart, ("figure3b", "figure3b_2"), data.interpretations)
    charts = [_density_chart(data.run), means, *(fits if data.comparable else ())]
    return [chart for chart in charts if chart.series]


def _density_chart(run: StudyRun) -> Chart:
    """The distribution of each head's entropy on LAMBADA, as in Figure 3a."""
    records = run.drafts(BPD, printed.LAMBADA)
    histograms = [record.entropy_counts for record in records]
    # Older records have none.
    by_head = zip(*histograms, strict=True) if all(histograms) else ()
    counts = [
        itertools.zip_longest(*map(from_digits, of_texts), fillvalue=0)
        for of_texts in by_head
    ]
    series = []
    for head, bins in enumerate(counts, start=1):
        density = np.array([*bins], float).sum(1)
        density /= density.sum() * ENTROPY_BIN
        points = {(i + 0.5) * ENTROPY_BIN: float(d) for i, d in enumerate(density)}
        series.append(line_of(f"head {head}", points))
    return Chart(
        "figure3a",
        f"Entropy of each head on {run.task_label(printed.LAMBADA)}: distribution",
        LINES,
        "entropy, nats",
        "density per nat",
        series,
    )


def _fit_chart(name: str, interpretation: _Interpretation) -> Chart:
    points = interpretation.points
    x, y = [float(x) for _, x, _ in points], [y for _, _, y in points]
    labels = [label for label, _, _ in points]
    series = [Series(interpretation.name, x, y, names=labels)] if x else []
    if (fit := interpretation.fit) is not None:
        line = {end: fit.intercept + fit.slope * end for end in (min(x), max(x))}
        label = f"fitted line, R = {decimal(fit.correlation)}"
        series.append(line_of(label, line, dashed=True))
    title = f"Block efficiency over h_max: {interpretation.name}"
    return Chart(name, title, POINTS, "h_max", "tokens per call", series)


def _vocabularies(data: _Entropies) -> str:
    """Whether the entropies of head 1 and of the others are comparable."""
    first, draft, full = _sizes(data.run)
    if first is None or draft is None or full is None:
        return (
            "All heads are taken to predict over the same vocabulary: the results do "
            "not say which."
        )
    if draft == full:
        return f"All heads predict over the full vocabulary of {full:,} tokens."
    if first == draft:
        return (
            f"Heads 2 to L predict over a draft vocabulary of {draft:,} of {full:,} "
            "tokens. The entropy of head 1 is of its distribution over these tokens, "
            "renormalised."
        )
    return (
        f"The entropy of head 1 is over {first:,} tokens, that of heads 2 to L "
        f"over a draft vocabulary of {draft:,}. Entropies over different vocabularies "
        "cannot be compared: h_max, which begins with head 1, is not judged, and the "
        "trend of entropy is that of heads 2 to L."
    )


@finding("On LAMBADA entropy increases with the number of the head.")
def _increases(data: _Entropies) -> Judgement | str:
    """Uses ranks, so that one decrease between two heads is not decisive."""
    entropies = data.by_task
    fits = {
        task: fit
        for task, all_heads in entropies.items()
        for values in [all_heads[data.first - 1 :]]
        if (fit := fit_line(range(1, len(values) + 1), values)) is not None
    }
    if printed.LAMBADA not in fits:
        return "LAMBADA was not measured, or has too few heads."
    fit = fits[printed.LAMBADA]
    grows = sum(fit.grows() is True for fit in fits.values())
    falls = sum(fit.falls() is True for fit in fits.values())
    return (
        fit.grows(),
        f"Rank correlation of entropy with the number of the head, from head "
        f"{data.first} on: {correlation(fit)}. Of all tasks, which the paper does not "
        f"judge, it increases on {grows} of {len(entropies)} and decreases on {falls}.",
    )


@finding("On other tasks entropy decreases from some head to the next.")
def _decreases_on_others(data: _Entropies) -> Judgement | str:
    last = {t: h_max(v) for t, v in data.by_task.items() if t != printed.LAMBADA}
    if not last:
        return "Not measured."
    if not data.comparable:
        return _NOT_COMPARABLE
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
    for interpretation in data.interpretations:
        holds, evidence = None, "h_max is constant, or there are too few points."
        if not data.comparable:
            evidence = _NOT_COMPARABLE
        elif (fit := interpretation.fit) is not None:
            holds = fit.grows() if interpretation.independent else None
            evidence = (
                f"R = {decimal(fit.correlation)}, rank correlation {correlation(fit)}; "
                f"the paper reports R = {printed.FIGURE3_CORRELATION}."
            )
        statement = f"Block efficiency increases with h_max ({interpretation.name})."
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
    findings=[
        _increases,
        _decreases_on_others,
        _correlates,
    ],
    notes=[
        "Entropy is in nats, averaged over all positions of the texts. h_max is the "
        "number of the last head up to which it never decreases; it does not depend on "
        "the unit of entropy.",
        "The paper does not define the points of its Figure 3b. Both interpretations "
        "are shown: tasks with several numbers of heads each, where h_max is at most "
        "that number, and tasks with all heads. With several numbers of heads, the "
        "points of a task are not independent, and both values grow with the number of "
        "heads: the p-value is too small, and the statement is not judged.",
        _vocabularies,
    ],
)
