"""Replaces infinite scores of a model, so that every path of a lattice has a score."""

import dataclasses
import math

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.model import NGramModel

# Log-probability of unseen n-grams (paper appendix D).
UNSEEN = -1000.0


def with_finite_scores(model: NGramModel) -> NGramModel:
    """Returns a model whose log-probabilities and back-off weights are finite.

    `UNSEEN` is the log-probability of tokens without a unigram and of the end-of-text
    token if the model has no `</s>`, and replaces log-probabilities and back-off
    weights of minus infinity.
    """
    symbols = np.arange(model.vocab_size)
    if model.end_of_text is not None:
        symbols[model.end_of_text] = model.eos
    model = model.with_unigrams(symbols, UNSEEN)
    return dataclasses.replace(
        model,
        log_probs=tuple(map(_finite, model.log_probs)),
        log_backoffs=tuple(map(_finite, model.log_backoffs)),
    )


def _finite(values: np.ndarray) -> np.ndarray:
    infinite = np.isneginf(values)
    return np.where(infinite, UNSEEN, values) if infinite.any() else values


def check_alpha(alpha: float) -> None:
    """Raises a `UserError` unless alpha is finite and not negative."""
    if not (math.isfinite(alpha) and alpha >= 0):
        raise UserError(f"alpha is {alpha}: it must be 0 or more.")
