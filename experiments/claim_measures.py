"""What the claims of the paper measure in the records of a study.

A function of this module returns the `measure` of a `Claim`, a function of a run. It
compares contenders on the paper's tasks. Contenders are patterns in the order of
preference, because the models of a size have names of their own.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.evaluation.efficiency import best_alpha
from bpd_jax.evaluation.statistics import h_max
from bpd_jax.studies.claims import (
    Effect,
    Measure,
    between_effect,
    ratio_effect,
    share_effect,
    trend_effects,
)
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.study_records import (
    PARTS,
    REPORT,
    DraftRecord,
    LatencyRecord,
    OracleRecord,
)
from bpd_jax.studies.tables import Sums, decimal
from experiments import printed
from experiments.figure3.study import mean_entropy
from experiments.table5.study import COUNTS, count_positions
from experiments.table11.run_costs import bpd_and_best, costs_of
from experiments.table12.latency import FST, PATHS_STEPS, PATHS_WIDTH
from experiments.table_e.timings import Timings

Names = str | tuple[str, ...]
Measured = Callable[[StudyRun], Sequence[Effect]]

TWO_GRAM: Names = ("ngram:1@general_2", "ngram:1@2gram")
FOUR_GRAM: Names = ("ngram:1@general_4", "ngram:1@4gram")
FOUR_GRAM_16: Names = ("ngram:16@general_4", "ngram:16@4gram")
NEURAL: Names = ("neural:1@general_neural", "neural:1@deep", "neural:1@own")
REFINED: Names = ("neural:1@own", "neural:1@deep", "neural:1")


def tasks_of(run: StudyRun) -> list[str]:
    """The paper's tasks among those of a run."""
    return [task for task in run.tasks if task in printed.TASKS]


def chosen(run: StudyRun, names: Names) -> str | None:
    """The first of some contenders that a run has; None if it has none."""
    options = (names,) if isinstance(names, str) else names
    return next((name for name in options if name in run.contenders), None)


def paired(
    run: StudyRun, names: Sequence[Names], task: str | None = None
) -> list[list[DraftRecord]] | None:
    """Records of contenders on the same texts of the paper's tasks, or of one task."""
    known = [chosen(run, each) for each in names]
    if None in known:
        return None
    tasks = tasks_of(run) if task is None else [task]
    by_task = [run.paired([name or "" for name in known], each) for each in tasks]
    return [[r for drafts in by_task for r in drafts[i]] for i in range(len(known))]


def efficiency_sums(records: Sequence[DraftRecord]) -> Sums:
    """Tokens and calls of every text."""
    tokens = np.array([record.tokens for record in records], float)
    return tokens, np.array([record.calls for record in records], float)


def gain(
    first: Names, second: Names = BPD, *, each_task: bool = False, margin: float = 0.0
) -> Measured:
    """The gain of one contender over another, over all tasks or on each.

    Args:
      margin: percentage points that are added, for claims that one is not much worse.
    """

    def measure(run: StudyRun) -> list[Effect]:
        tasks = tasks_of(run) if each_task else [None]
        effects = []
        for task in tasks:
            records = paired(run, [first, second], task)
            if records is None or not records[0]:
                return []
            both = map(efficiency_sums, records)
            label = run.task_label(task, "")
            effect = ratio_effect(*both, tests=len(tasks), task=label)
            effects.append(_shifted(effect, margin) if margin else effect)
        return effects

    return measure


def _shifted(effect: Effect, margin: float) -> Effect:
    """An effect with a margin, and itself as a note."""
    interval = effect.interval
    if interval is not None:
        interval = interval[0] + margin, interval[1] + margin
    note = f"difference {effect}"
    return dataclasses.replace(
        effect, value=effect.value + margin, interval=interval, note=note
    )


def highest(task: str) -> Measured:
    """How far BPD's block efficiency on a task is above that on each other task."""

    def measure(run: StudyRun) -> list[Effect]:
        tasks = tasks_of(run)
        if task not in tasks:
            return []
        sums = {t: efficiency_sums(run.drafts(BPD, t).records) for t in tasks}
        return [
            between_effect(sums[task], sums[other], task=run.task_label(other))
            for other in tasks
            if other != task
        ]

    return measure


def lowest(low: Sequence[str]) -> Measured:
    """How far BPD's block efficiency on all other tasks is above that on some."""

    def measure(run: StudyRun) -> list[Effect]:
        groups: list[list[DraftRecord]] = [[], []]
        for task in tasks_of(run):
            groups[task in low] += run.drafts(BPD, task).records
        above, below = map(efficiency_sums, groups)
        return [between_effect(above, below)] if len(groups[0]) else []

    return measure


def weak_gain(refined: Names) -> Measured:
    """Whether the gain falls as BPD's block efficiency rises, over the tasks."""

    def measure(run: StudyRun) -> list[Effect]:
        points: list[tuple[int, Measure, Measure]] = []
        for task in tasks_of(run):
            records = paired(run, [BPD, refined], task)
            if records is None:
                return []
            base, better = map(efficiency_sums, records)
            points.append(
                (
                    len(records[0]),
                    functools.partial(_efficiency, base),
                    functools.partial(_gain, better, base),
                )
            )
        return trend_effects(points, -1)

    return measure


def _efficiency(sums: Sums, texts: np.ndarray) -> float:
    return float(sums[0][texts].sum() / sums[1][texts].sum())


def _gain(sums: Sums, base: Sums, texts: np.ndarray) -> float:
    return _efficiency(sums, texts) / _efficiency(base, texts) - 1


def repetition(refined: Names, kind: str) -> Measured:
    """How far refinement lowers repetition, on each task.

    Args:
      kind: "equal", the share of equal neighbours in percentage points, or "longest",
        the mean longest run in tokens.
    """

    def measure(run: StudyRun) -> list[Effect]:
        effects, tasks = [], tasks_of(run)
        for task in tasks:
            records = paired(run, [BPD, refined], task)
            if records is None or not records[0]:
                return []
            before, after = (_repetition(each, kind) for each in records)
            points = kind == "equal"
            effects.append(
                share_effect(
                    before,
                    after,
                    scale=100.0 if points else 1.0,
                    tests=len(tasks),
                    unit="points" if points else "tokens",
                    task=run.task_label(task),
                )
            )
        return effects

    return measure


def _repetition(records: Sequence[DraftRecord], kind: str) -> Sums:
    sums = np.array([record.repetition for record in records], float)
    equal, pairs, longest, drafts = sums.T
    return (equal, pairs) if kind == "equal" else (longest, drafts)


def repairs(run: StudyRun) -> list[Effect]:
    """Repairs of repetition among wins against those among ties, the base rate."""
    counts = _positions(run)
    if counts is None:
        return []
    of = dict(zip(COUNTS, counts.T, strict=True))
    wins, ties, losses = (
        100 * of[f"{side}_repair"].sum() / of[side].sum()
        for side in ("wins", "ties", "losses")
    )
    note = (
        f"{decimal(wins, 1)} % of wins, {decimal(ties, 1)} % of ties, "
        f"{decimal(losses, 1)} % of losses"
    )
    first, second = ((of[f"{s}_repair"], of[s]) for s in ("wins", "ties"))
    return [share_effect(first, second, unit="points", note=note)]


def repairs_drive_gains(run: StudyRun) -> list[Effect]:
    """Whether texts gain more in which more drafts are repaired.

    The effect is the difference in wins minus losses, in percentage points of the
    positions, between the half of the texts with more repairs and the other half.
    """
    counts = _positions(run)
    if counts is None:
        return []
    of = dict(zip(COUNTS, counts.T, strict=True))
    positions = of["ties"] + of["wins"] + of["losses"]
    repaired = of["ties_repair"] + of["wins_repair"] + of["losses_repair"]
    order = np.argsort(repaired / positions, kind="stable")
    margin = of["wins"] - of["losses"]
    few, many = np.array_split(order, 2)
    both = [(margin[half], positions[half]) for half in (many, few)]
    return [between_effect(*both, shares=True, unit="points")]


def _positions(run: StudyRun) -> np.ndarray | None:
    """The counts of Table 5 for every text, `[n, 8]`."""
    records = paired(run, [BPD, REFINED])
    if records is None or not records[0]:
        return None
    return np.array([*map(count_positions, *records)], float)


def weight_trend(refiner: str) -> Measured:
    """Whether the best α falls as BPD's block efficiency rises, over the tasks.

    α is tuned on half of all texts of a task, reported ones included.
    """

    def measure(run: StudyRun) -> list[Effect]:
        family = {
            float(name.partition("alpha=")[2].partition("@")[0]): name
            for name in run.contenders
            if name.startswith(f"{refiner}:1:alpha=")
        }
        family.pop(0.0, None)
        points: list[tuple[int, Measure, Measure]] = []
        for task in tasks_of(run):
            parts = [run.paired([BPD, *family.values()], task, part) for part in PARTS]
            records = [[*one, *other] for one, other in zip(*parts, strict=True)]
            if not family:
                return []
            base, *others = map(efficiency_sums, records)
            weights = dict(zip(family, others, strict=True))
            points.append(
                (
                    len(records[0]),
                    functools.partial(_efficiency, base),
                    functools.partial(_best_weight, weights),
                )
            )
        return trend_effects(points, -1)

    return measure


def _best_weight(weights: dict[float, Sums], texts: np.ndarray) -> float:
    return best_alpha({a: _efficiency(sums, texts) for a, sums in weights.items()})


def costs(run: StudyRun, quantity: str, most: float) -> list[Effect]:
    """By how much a change from BPD to 16 drafts stays below `most` percent.

    By formula, from measured block efficiencies, so without an interval of its own.
    """
    pair = bpd_and_best(costs_of(run))
    if pair is None:
        return []
    (_, before), (_, after) = pair
    change = 100 * (getattr(after, quantity) / getattr(before, quantity) - 1)
    below = most - change
    note = f"change {decimal(change, 1, sign=True)} %, by formula"
    return [Effect(below, (below, below), "points", note=note)]


def latency(most: float) -> Measured:
    """By how much OpenFst's search for 16 drafts stays below some milliseconds."""

    def measure(run: StudyRun) -> list[Effect]:
        times = [
            r.milliseconds
            for r in run.of(LatencyRecord)
            if (r.engine, r.steps, r.width, r.paths)
            == (FST, PATHS_STEPS, PATHS_WIDTH, 16)
        ]
        if not times:
            return []
        values, ones = np.array(times[0]), np.ones(len(times[0]))
        return [
            share_effect((most - values, ones), (0 * ones, ones), scale=1, unit="ms")
        ]

    return measure


def entropy_rises(task: str) -> Measured:
    """By how much entropy rises from head 1 to the last head on a task, in nats."""

    def measure(run: StudyRun) -> list[Effect]:
        if not _comparable(run) or task not in run.tasks:
            return []
        records = [r for r in run.drafts(BPD, task) if r.head_entropy]
        tokens = np.array([r.tokens for r in records], float)
        first, last = (
            (np.array([r.head_entropy[i] for r in records]) * tokens, tokens)
            for i in (0, -1)
        )
        return [share_effect(last, first, scale=1, unit="nats")] if records else []

    return measure


def entropy_trend(run: StudyRun) -> list[Effect]:
    """Whether block efficiency rises with h_max, over the tasks."""
    points: list[tuple[int, Measure, Measure]] = []
    for task in tasks_of(run):
        records = [r for r in run.drafts(BPD, task) if r.head_entropy]
        if not _comparable(run):
            return []
        sums = efficiency_sums(records)
        points.append(
            (
                len(records),
                functools.partial(_last_rise, records),
                functools.partial(_efficiency, sums),
            )
        )
    return trend_effects(points, 1)


def _last_rise(records: Sequence[DraftRecord], texts: np.ndarray) -> float:
    return float(h_max(mean_entropy(records[i] for i in texts)))


def _comparable(run: StudyRun) -> bool:
    """Whether entropies of all heads are over the same tokens."""
    facts = run.facts
    first = facts.get("entropy_vocabulary", facts.get("vocabulary"))
    return bool(first == facts.get("draft_vocabulary"))


def weak_headroom(run: StudyRun) -> list[Effect]:
    """Whether the oracle's gain falls as BPD's block efficiency rises."""
    points: list[tuple[int, Measure, Measure]] = []
    for task in tasks_of(run):
        records = [
            r for r in run.of(OracleRecord) if (r.task, r.part) == (task, REPORT)
        ]
        if not records:
            return []
        tokens = np.array([r.tokens for r in records], float)
        one, most = (
            (tokens, np.array([r.calls[-1][k] for r in records], float))
            for k in (0, -1)
        )
        points.append(
            (
                len(records),
                functools.partial(_efficiency, one),
                functools.partial(_gain, most, one),
            )
        )
    return trend_effects(points, -1)


def timed(first: Names, second: Names, *, speed: bool) -> Measured:
    """The gain of one timed contender over another at temperature 0.

    Args:
      speed: whether in tokens per second, not in tokens per serial call.
    """

    def measure(run: StudyRun) -> list[Effect]:
        timings = Timings(run)
        known = [GREEDY.name, *timings.contenders(0.0)]
        names = [
            next((n for n in ([o] if isinstance(o, str) else o) if n in known), "")
            for o in (first, second)
        ]
        sums = timings.sums(names, 0.0) if all(names) else None
        if sums is None:
            return []
        one, other = (
            (each.tokens, each.milliseconds if speed else each.calls) for each in sums
        )
        return [ratio_effect(one, other)]

    return measure
