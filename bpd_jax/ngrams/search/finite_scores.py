"""Replaces infinite scores of a model, so that every path of a lattice has a score."""

import dataclasses
import math

import numpy as np

from bpd_jax.errors import UserError
from bpd_jax.ngrams.model import NGramModel

# Log-probability of unseen n-grams (paper appendix C).
UNSEEN = -1000.0


def with_finite_scores(model: NGramModel) -> NGramModel:
    """Returns a model whose log-probabilities and back-off weights are finite.

    `UNSEEN` is the log-probability of tokens without a unigram and of the end-of-text
    token if the model has no `</s>`, and replaces log-probabilities and back-off
    weights of minus infinity.
    """
    model = model.with_unseen_tokens(UNSEEN)
    ends = np.searchsorted(model.keys[0], model.eos)
    has_end = ends < model.keys[0].size and model.keys[0][ends] == model.eos
    if model.end_of_text is not None and not has_end:
        # Only the index of `<s>`, the last symbol, changes.
        indices = np.arange(model.keys[0].size)
        indices[indices >= ends] += 1
        keys = [np.insert(model.keys[0], ends, model.eos)]
        log_probs = [np.insert(model.log_probs[0], ends, UNSEEN)]
        log_backoffs = list(model.log_backoffs)
        if model.order > 1:
            parents, symbols = np.divmod(model.keys[1], model.width)
            keys.append(indices[parents] * model.width + symbols)
            log_backoffs[0] = np.insert(log_backoffs[0], ends, 0.0)
        model = dataclasses.replace(
            model,
            keys=(*keys, *model.keys[2:]),
            log_probs=(*log_probs, *model.log_probs[1:]),
            log_backoffs=tuple(log_backoffs),
        )
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
