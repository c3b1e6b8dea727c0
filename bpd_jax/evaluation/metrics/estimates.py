"""Mean scores and perplexities of many examples, with bootstrap intervals."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.evaluation.efficiency import ratio_interval
from bpd_jax.evaluation.metrics.task_metrics import PERPLEXITIES


class Estimate(NamedTuple):
    """A value and its 95 % bootstrap interval; the interval is None for one example."""

    value: float
    interval: tuple[float, float] | None


def estimate(name: str, scores: Sequence[Mapping[str, float]]) -> Estimate | None:
    """Aggregates one score over examples.

    A perplexity is the exponential of the mean negative log-probability per token;
    other scores are means in percent.

    Args:
      name: name of the score, a key of `task_metrics.SCORE_LABELS`.
      scores: scores of every example, from a `Metric` or `lambada.passage_scores`.

    Returns:
      None if no example has this score.
    """
    parts = PERPLEXITIES.get(name, (name,))
    rows = [[row[p] for p in parts] for row in scores if all(p in row for p in parts)]
    if not rows:
        return None
    columns = np.array(rows, float).T
    if name in PERPLEXITIES:
        numerators, denominators, finish = -columns[0], columns[1], math.exp
    else:
        numerators, denominators, finish = 100 * columns[0], np.ones(len(rows)), float
    value = finish(float(numerators.sum()) / float(denominators.sum()))
    if len(rows) == 1:
        return Estimate(value, None)
    low, high = ratio_interval(numerators, denominators)
    return Estimate(value, (finish(low), finish(high)))
