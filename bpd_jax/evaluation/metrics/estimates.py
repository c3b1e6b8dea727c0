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


def mean(values: Sequence[float]) -> Estimate:
    """The mean over at least one example."""
    return _ratio(np.asarray(values, float), np.ones(len(values)))


def perplexity(log_probs: Sequence[float], tokens: Sequence[float]) -> Estimate:
    """The exponential of the mean negative log-probability per token.

    Args:
      log_probs: log-probability of each example, in nats.
      tokens: number of tokens of each example.
    """
    ratio = _ratio(-np.asarray(log_probs, float), np.asarray(tokens, float))
    interval = ratio.interval
    if interval is not None:
        interval = math.exp(interval[0]), math.exp(interval[1])
    return Estimate(math.exp(ratio.value), interval)


def _ratio(numerators: np.ndarray, denominators: np.ndarray) -> Estimate:
    value = float(numerators.sum()) / float(denominators.sum())
    several = len(numerators) > 1
    return Estimate(
        value, ratio_interval(numerators, denominators) if several else None
    )


def estimate(name: str, scores: Sequence[Mapping[str, float]]) -> Estimate | None:
    """Aggregates one score over examples; scores other than perplexities in percent.

    Args:
      name: name of the score, a key of `task_metrics.LABELS`.
      scores: scores of every example, from a `Metric` or `lambada.passage_scores`.

    Returns:
      None if no example has this score.
    """
    parts = PERPLEXITIES.get(name, (name,))
    columns = [
        [row[part] for row in scores if all(part in row for part in parts)]
        for part in parts
    ]
    if not columns[0]:
        return None
    if name in PERPLEXITIES:
        return perplexity(*columns)
    return mean([100 * value for value in columns[0]])
