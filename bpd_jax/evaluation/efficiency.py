"""Block efficiency and shares over many prompts, with bootstrap intervals."""

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bpd_jax.decoding.generate import Generation

_LEVEL, _RESAMPLES = 0.95, 2000
# Number of indices drawn together, which limits memory: NewsRoom has 100,000 examples.
_MOST_DRAWN = 1 << 24


def block_efficiency(generations: Sequence[Generation]) -> float:
    """Decoded tokens per serial call over all prompts (paper section 5)."""
    tokens, calls = _sums(generations)
    return float(tokens.sum()) / max(float(calls.sum()), 1.0)


def headroom_taken(efficiency: float, base: float, oracle: float) -> float | None:
    """Share of the headroom: (BE - BE of BPD) / (BE of the oracle - BE of BPD).

    >>> headroom_taken(1.75, base=1.5, oracle=2.5)
    0.25

    Args:
      efficiency: block efficiency of a method.
      base: block efficiency of BPD.
      oracle: block efficiency of the oracle over the lattice that the method chooses
        from, in the paper k = 16.

    Returns:
      1 for the oracle itself, negative below BPD; None if the oracle gains nothing.
    """
    return (efficiency - base) / (oracle - base) if oracle > base else None


def best_alpha(efficiencies: Mapping[float, float]) -> float:
    """The weight α of a rescorer (paper appendix E) with the highest block efficiency.

    Ties go to the one nearest 1. 1 is the default without tuning: heads and rescorer
    have equal weight. Values at the ends of the grid generalise worst to other texts.
    Of two weights at the same distance from 1 the smaller one is chosen, which gives
    the model's own heads more weight.

    Args:
      efficiencies: block efficiency by α over the same examples; at least one.
    """
    return min(efficiencies, key=lambda a: (-efficiencies[a], abs(a - 1), a))


def bootstrap_interval(generations: Sequence[Generation]) -> tuple[float, float]:
    """Percentile interval of the block efficiency; see `ratio_interval`."""
    return ratio_interval(*_sums(generations))


def paired_interval(
    generations: Sequence[Generation], base: Sequence[Generation]
) -> tuple[float, float]:
    """Percentile interval of the gain over another method; see `gain_interval`."""
    return gain_interval(*_sums(generations), *_sums(base))


def ratio_interval(tokens: np.ndarray, calls: np.ndarray) -> tuple[float, float]:
    """Percentile interval of Σ tokens / Σ calls, resampling examples.

    Each resample draws n examples with replacement, and divides the sum of their
    tokens by the sum of their calls.

    Args:
      tokens, calls: number of tokens and of serial calls of every example, `[n]`.
    """
    return bootstrap(
        lambda drawn: tokens[drawn].sum(-1) / np.maximum(calls[drawn].sum(-1), 1),
        len(tokens),
    )


def gain_interval(
    tokens: np.ndarray,
    calls: np.ndarray,
    base_tokens: np.ndarray,
    base_calls: np.ndarray,
) -> tuple[float, float]:
    """Percentile interval of the gain in block efficiency over another method.

    Every resample draws the same examples for both methods. An example that is hard
    for one method is usually hard for the other, so the interval is far narrower than
    that of either method. Arguments are those of `ratio_interval`; examples are in the
    same order for both methods.
    """

    def gain(drawn: np.ndarray) -> np.ndarray:
        efficiency, base = (
            t[drawn].sum(-1) / np.maximum(c[drawn].sum(-1), 1)
            for t, c in ((tokens, calls), (base_tokens, base_calls))
        )
        gains: np.ndarray = efficiency / np.maximum(base, 1e-9) - 1
        return gains

    return bootstrap(gain, len(base_tokens))


def speedup_interval(
    plain: Sequence[Sequence[float]], other: Sequence[Sequence[float]], batch: int
) -> tuple[float, float]:
    """Percentile interval of a speed-up, resampling batches of prompts.

    Args:
      plain, other: seconds of each prompt in each round, of plain decoding and of a
        method.
      batch: prompts that are decoded together, among which their time is divided.
    """
    begins = np.arange(0, len(plain[0]), batch)
    totals, seconds = (
        np.add.reduceat(np.sum(times, axis=0), begins) for times in (plain, other)
    )
    return bootstrap(
        lambda drawn: totals[drawn].sum(-1) / seconds[drawn].sum(-1), len(begins)
    )


def difference_interval(
    events: np.ndarray,
    cases: np.ndarray,
    base_events: np.ndarray,
    base_cases: np.ndarray,
) -> tuple[float, float] | None:
    """Percentile interval of a difference of shares, resampling examples.

    The difference is Σ events / Σ cases - Σ base events / Σ base cases; every resample
    draws the same examples for both shares. A resample without cases is left out.

    Args:
      events, cases: number of cases of every example, and of those with the event,
        `[n]`.
      base_events, base_cases: the same for the other share, in the same order.

    Returns:
      None if no resample has cases of both shares.
    """
    if not cases.any() or not base_cases.any():
        return None

    def difference(drawn: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            shares: np.ndarray = events[drawn].sum(-1) / cases[drawn].sum(-1)
            return shares - base_events[drawn].sum(-1) / base_cases[drawn].sum(-1)

    return bootstrap(difference, len(cases))


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray], count: int, level: float = _LEVEL
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic of examples.

    Args:
      statistic: maps indices of examples, `[..., n]`, to values, `[...]`; resamples
        whose value is NaN are left out.
      count: n, the number of examples.
      level: level of the interval.
    """
    # Imported late: it takes half a second, which every command would wait.
    from scipy import stats

    if count == 1:
        value = float(statistic(np.zeros((1, 1), int))[0])
        return value, value
    with warnings.catch_warnings():
        # SciPy's own interval, which is not used, does not support missing values.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        values = stats.bootstrap(
            (np.arange(count),),
            lambda drawn, axis: statistic(drawn.astype(int)),
            n_resamples=_RESAMPLES,
            vectorized=True,
            batch=max(_MOST_DRAWN // count, 1),
            method="percentile",
            rng=np.random.default_rng(0),
        ).bootstrap_distribution
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _sums(generations: Sequence[Generation]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([len(g.output_ids) for g in generations])
    calls = np.array([g.serial_calls for g in generations])
    return tokens, calls
