"""Claims of a paper as predicates over records, and the rule that judges them.

A claim says that a number is positive: a gain, a difference of shares, a trend. Its
predicate measures this number, the *effect*, in a run, with a 95 % interval over texts.
One rule judges all claims (`verdict`), so that no verdict depends on its words:

- *agrees*: the interval of every effect is above 0;
- *contrary*: the interval of an effect is below 0;
- *open*: neither; so is an effect that is measured too unreliably;
- *as expected by construction*: no measurement can contradict the claim.

A claim about every task has an effect for each task, with intervals of the level that
Bonferroni's correction gives for a contradiction.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from bpd_jax.evaluation.efficiency import bootstrap
from bpd_jax.evaluation.statistics import FEWEST, combined_verdict, exceeds
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.tables import Sums, decimal

AGREES, CONTRARY, OPEN, BY_CONSTRUCTION = VERDICTS = (
    "agrees",
    "contrary",
    "open",
    "as expected by construction",
)

LEVEL = 0.95
_RESAMPLES, _SPLITS, _TREND_RESAMPLES = 2000, 50, 400
# Reliability below which a trend over tasks is not judged: half of the variance of what
# is measured is then noise.
LEAST_RELIABILITY = 0.5


@dataclasses.dataclass(frozen=True)
class Effect:
    """A measured number that a claim says is positive.

    Attributes:
      value: the number.
      interval: its interval over texts; None if there are too few.
      unit: unit of the number: "%", "points", "nats" or "".
      task: label of its task; "" for all tasks together.
      note: further numbers, such as what the effect was computed from.
      reliable: whether it is measured reliably enough to be judged.
    """

    value: float
    interval: tuple[float, float] | None
    unit: str = "%"
    task: str = ""
    note: str = ""
    reliable: bool = True

    def __str__(self) -> str:
        """The number with its interval.

        >>> print(Effect(20.04, (13.5, 26.0)))
        +20.0 % (+13.5…+26.0)
        """
        digits, unit = (2, "") if self.unit == "" else (1, f" {self.unit}")
        text = f"{decimal(self.value, digits, sign=True)}{unit}"
        if self.interval is not None:
            low, high = (decimal(end, digits, sign=True) for end in self.interval)
            text += f" ({low}…{high})"
        return text


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement of a paper.

    Attributes:
      item: the table or figure that it belongs to, such as "Table 4".
      source: section of the paper, or its table where the text does not say it.
      statement: the statement, such that its effect is positive if it is true.
      study: name of the study whose records decide.
      measure: measures its effects; [] if the run lacks what it needs.
      certain: whether it holds by construction.
    """

    item: str
    source: str
    statement: str
    study: str
    measure: Callable[[StudyRun], Sequence[Effect]]
    certain: bool = False


def verdict(claim: Claim, effects: Sequence[Effect]) -> str:
    """The verdict on a claim; see the module.

    >>> claim = Claim("Table 4", "7.3", "16 drafts gain.", "table4", lambda run: [])
    >>> verdict(claim, [Effect(20.0, (13.5, 26.0)), Effect(1.0, (-0.5, 2.5))])
    'open'
    """
    if claim.certain:
        return BY_CONSTRUCTION
    return {True: AGREES, False: CONTRARY, None: OPEN}[judge(effects)]


def judge(effects: Sequence[Effect]) -> bool | None:
    """Whether effects are positive, by the rule; None if this is open."""
    return combined_verdict(
        [
            exceeds(effect.interval) if effect.interval and effect.reliable else None
            for effect in effects
        ]
    )


def summary(effects: Sequence[Effect]) -> str:
    """Effects in a few words: one as it is, several by how many are positive."""
    if len(effects) == 1:
        [effect] = effects
        return f"{effect}{f'; {effect.note}' * bool(effect.note)}"
    signs = [exceeds(e.interval) if e.interval else None for e in effects]
    below = [e for e, s in zip(effects, signs, strict=True) if s is False]
    values = [effect.value for effect in effects]
    unit = effects[0].unit
    low, high = (decimal(end, 1, sign=True) for end in (min(values), max(values)))
    text = f"{low} to {high} {unit}, above 0 on {signs.count(True)} of {len(effects)}"
    if below:
        text += f", below on {', '.join(effect.task for effect in below)}"
    return text


def interval_of(
    statistic: Callable[[np.ndarray], np.ndarray], texts: int, tests: int = 1
) -> tuple[float, float] | None:
    """The interval of a statistic of texts; None if there are too few of them.

    Args:
      statistic: see `bootstrap`.
      texts: number of texts.
      tests: number of tests that the level is corrected for.
    """
    if texts < FEWEST:
        return None
    return bootstrap(statistic, texts, 1 - (1 - LEVEL) / tests)


def ratio_effect(first: Sums, second: Sums, *, tests: int = 1, **text: Any) -> Effect:
    """How much larger one ratio of sums is than another, in percent.

    Args:
      first, second: sums of the same texts, in the same order.
      tests: see `interval_of`.
      **text: further fields of `Effect`.
    """

    def change(drawn: np.ndarray) -> np.ndarray:
        return 100 * (_ratio(first, drawn) / _ratio(second, drawn) - 1)

    count = len(first[0])
    value = float(change(np.arange(count)))
    return Effect(value, interval_of(change, count, tests), **text)


def between_effect(
    first: Sums, second: Sums, *, shares: bool = False, **text: Any
) -> Effect:
    """The same for two groups of different texts.

    Args:
      shares: whether the ratios are shares, whose difference in percentage points is
        the effect.
    """
    counts = len(first[0]), len(second[0])
    rng = np.random.default_rng(0)
    whole = [np.arange(n) for n in counts]
    drawn = [rng.integers(n, size=(_RESAMPLES, n)) for n in counts]

    def change(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        ratios = _ratio(first, one), _ratio(second, other)
        return 100 * (ratios[0] - ratios[1] if shares else ratios[0] / ratios[1] - 1)

    interval = _ends(change(*drawn)) if min(counts) >= FEWEST else None
    return Effect(float(change(*whole)), interval, **text)


def share_effect(
    first: Sums, second: Sums, *, scale: float = 100.0, tests: int = 1, **text: Any
) -> Effect:
    """The difference of two ratios of sums of the same texts, times `scale`.

    With the default, shares in percentage points. See `ratio_effect`.
    """

    def difference(drawn: np.ndarray) -> np.ndarray:
        return scale * (_ratio(first, drawn) - _ratio(second, drawn))

    count = len(first[0])
    value = float(difference(np.arange(count)))
    return Effect(value, interval_of(difference, count, tests), **text)


Measure = Callable[[np.ndarray], float]
"""Maps the indices of some texts of a task to a number."""


def trend_effects(
    tasks: Sequence[tuple[int, Measure, Measure]], sign: int
) -> list[Effect]:
    """The rank correlation over tasks of two numbers, times `sign`.

    The two numbers are of different halves of each task's texts, because those of the
    same texts share their noise: a text with a low block efficiency by chance has a
    high gain over it. The interval is over tasks and texts.

    Args:
      tasks: number of texts, and the two numbers, of each task.
      sign: -1 for a claim that one number falls as the other one rises.

    Returns:
      One effect; none of fewer than three tasks, or with fewer than four texts of one.
    """
    if len(tasks) < 3 or min(count for count, *_ in tasks) < 4:
        return []
    rng = np.random.default_rng(0)

    def halves(count: int) -> tuple[np.ndarray, np.ndarray]:
        order = rng.permutation(count)
        return order[: count // 2], order[count // 2 :]

    plain: list[list[float]] = []
    for _ in range(_SPLITS):
        rows = []
        for count, first, second in tasks:
            one, other = halves(count)
            rows.append((first(one), first(other), second(one), second(other)))
        x, x_other, y, y_other = map(np.array, zip(*rows, strict=True))
        pairs = (x, y_other), (x, x_other), (y, y_other)
        plain.append([_rank_correlation(*pair) for pair in pairs])
    value, *reliabilities = np.nanmean(plain, axis=0).tolist()
    drawn = []
    for _ in range(_TREND_RESAMPLES):
        chosen = [tasks[i] for i in rng.integers(len(tasks), size=len(tasks))]
        points = []
        for count, first, second in chosen:
            one, other = (rng.choice(half, len(half)) for half in halves(count))
            points.append((first(one), second(other)))
        drawn.append(_rank_correlation(*map(np.array, zip(*points, strict=True))))
    note = f"reliabilities {decimal(reliabilities[0])}, {decimal(reliabilities[1])}"
    reliable = min(reliabilities) >= LEAST_RELIABILITY
    interval = _ends(sign * np.array(drawn))
    return [Effect(sign * value, interval, "", note=note, reliable=reliable)]


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's; NaN if all values of one are equal."""
    ranks = [stats.rankdata(values) for values in (x, y)]
    if any(np.ptp(each) == 0 for each in ranks):
        return float("nan")
    return float(np.corrcoef(*ranks)[0, 1])


def _ratio(sums: Sums, drawn: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio: np.ndarray = sums[0][drawn].sum(-1) / sums[1][drawn].sum(-1)
    return ratio


def _ends(values: np.ndarray) -> tuple[float, float]:
    low, high = np.nanquantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
