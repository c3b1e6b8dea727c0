"""Block efficiency over many prompts, with bootstrap intervals."""

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
    """Percentile interval of the block efficiency, resampling prompts.

    Each resample draws as many prompts as there are, with replacement, and divides
    the sum of their tokens by the sum of their calls.
    """
    tokens, calls = _sums(generations)
    drawn = np.random.default_rng(seed).integers(
        0, len(tokens), size=(resamples, len(tokens))
    )
    ratios = tokens[drawn].sum(1) / np.maximum(calls[drawn].sum(1), 1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_interval(
    generations: Sequence[Generation],
    base: Sequence[Generation],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of the gain in block efficiency over another method.

    Every resample draws the same prompts for both methods: what is hard for one is
    hard for the other, so the interval is far narrower than that of either.
    """
    drawn = np.random.default_rng(seed).integers(
        0, len(base), size=(resamples, len(base))
    )
    ratios = []
    for method in (generations, base):
        tokens, calls = _sums(method)
        ratios.append(tokens[drawn].sum(1) / np.maximum(calls[drawn].sum(1), 1))
    gains = ratios[0] / np.maximum(ratios[1], 1e-9) - 1
    low, high = np.quantile(gains, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _sums(generations: Sequence[Generation]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([len(g.output_ids) for g in generations])
    calls = np.array([g.serial_calls for g in generations])
    return tokens, calls
