"""Scores of many examples as one number with its interval."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.evaluation.efficiency import ratio_interval
from bpd_jax.evaluation.metrics.catalog import PERPLEXITIES


class Estimate(NamedTuple):
    """A number, and its 95 % bootstrap interval over examples if there are several."""

    value: float
    interval: tuple[float, float] | None


def mean(values: Sequence[float]) -> Estimate:
    """The mean over examples, of which there are one or more."""
    found = np.asarray(values, float)
    return _ratio(found, np.ones(len(found)))


def perplexity(log_probs: Sequence[float], tokens: Sequence[float]) -> Estimate:
    """exp of the mean negative log-probability of a token, over all examples.

    Args:
      log_probs: sums in nats of each example.
      tokens: how many tokens each sum is of.
    """
    ratio = _ratio(-np.asarray(log_probs, float), np.asarray(tokens, float))
    interval = ratio.interval
    if interval is not None:
        interval = math.exp(interval[0]), math.exp(interval[1])
    return Estimate(math.exp(ratio.value), interval)


def _ratio(numerators: np.ndarray, denominators: np.ndarray) -> Estimate:
    value = float(numerators.sum() / denominators.sum())
    several = len(numerators) > 1
    return Estimate(
        value, ratio_interval(numerators, denominators) if several else None
    )


def estimate(name: str, scores: Sequence[Mapping[str, float]]) -> Estimate | None:
    """One score over examples: a perplexity as itself, all others in percent.

    Args:
      name: of the score, one of `catalog.LABELS`.
      scores: of every example, as metrics and `lambada.passage_scores` give them.

    Returns:
      None if no example has that score.
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
