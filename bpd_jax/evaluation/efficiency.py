"""Block efficiency and shares over many prompts, with bootstrap intervals."""

from collections.abc import Sequence

import numpy as np

from bpd_jax.decoding.generate import Generation


def block_efficiency(generations: Sequence[Generation]) -> float:
    """Decoded tokens per serial call over all prompts (paper section 5)."""
    tokens, calls = _sums(generations)
    return float(tokens.sum() / max(calls.sum(), 1))


def bootstrap_interval(
    generations: Sequence[Generation],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of the block efficiency; see `ratio_interval`."""
    tokens, calls = _sums(generations)
    return ratio_interval(tokens, calls, level=level, resamples=resamples, seed=seed)


def paired_interval(
    generations: Sequence[Generation],
    base: Sequence[Generation],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of the gain over another method; see `gain_interval`."""
    return gain_interval(
        *_sums(generations),
        *_sums(base),
        level=level,
        resamples=resamples,
        seed=seed,
    )


def ratio_interval(
    tokens: np.ndarray,
    calls: np.ndarray,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of Σ tokens / Σ calls, resampling examples.

    Each resample draws as many examples as there are, with replacement, and divides
    the sum of their tokens by the sum of their calls.

    Args:
      tokens, calls: of every example, `[n]`.
      level: share of the resamples inside.
      resamples: how many.
      seed: of the draws.
    """
    drawn = _drawn(len(tokens), resamples, seed)
    ratios = tokens[drawn].sum(1) / np.maximum(calls[drawn].sum(1), 1)
    return _percentiles(ratios, level)


def gain_interval(
    tokens: np.ndarray,
    calls: np.ndarray,
    base_tokens: np.ndarray,
    base_calls: np.ndarray,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of the gain in block efficiency over another method.

    Every resample draws the same examples for both methods: what is hard for one is
    hard for the other, so the interval is far narrower than that of either. Arguments
    are those of `ratio_interval`; examples stand in the same order for both methods.
    """
    drawn = _drawn(len(base_tokens), resamples, seed)
    mine, theirs = (
        t[drawn].sum(1) / np.maximum(c[drawn].sum(1), 1)
        for t, c in ((tokens, calls), (base_tokens, base_calls))
    )
    return _percentiles(mine / np.maximum(theirs, 1e-9) - 1, level)


def difference_interval(
    events: np.ndarray,
    cases: np.ndarray,
    base_events: np.ndarray,
    base_cases: np.ndarray,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile interval of a difference of shares, resampling examples.

    That is Σ events / Σ cases - Σ base events / Σ base cases; every resample draws the
    same examples for both shares. One without a case of either is left out.

    Args:
      events, cases: of every example, how many cases there are and of how many the
        event is seen, `[n]`.
      base_events, base_cases: of the other share, in the same order.
      level, resamples, seed: as in `ratio_interval`.

    Returns:
      None if no resample has cases of both.
    """
    if not len(cases):
        return None
    drawn = _drawn(len(cases), resamples, seed)
    seen, all_, base_seen, base_all = (
        values[drawn].sum(1) for values in (events, cases, base_events, base_cases)
    )
    both = (all_ > 0) & (base_all > 0)
    if not both.any():
        return None
    shares, base_shares = seen[both] / all_[both], base_seen[both] / base_all[both]
    return _percentiles(shares - base_shares, level)


def _drawn(count: int, resamples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, size=(resamples, count))


def _percentiles(values: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _sums(generations: Sequence[Generation]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([len(g.output_ids) for g in generations])
    calls = np.array([g.serial_calls for g in generations])
    return tokens, calls
