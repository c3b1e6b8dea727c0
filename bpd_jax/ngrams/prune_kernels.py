"""Compiled loops of `bpd_jax.ngrams.prune`."""

import math

import numba
import numpy as np

from bpd_jax.ngrams.trie_kernels import FLOATS, FLOATS_OUT, INTS, RANGE

_FLOAT_PAIR = numba.types.UniTuple(FLOATS, 2)


@numba.njit(
    numba.types.void(
        INTS, INTS, _FLOAT_PAIR, _FLOAT_PAIR, _FLOAT_PAIR, FLOATS, FLOATS_OUT, *RANGE
    ),
    cache=True,
    nogil=True,
)
def fill_relative_entropies(
    offsets: np.ndarray,
    links: np.ndarray,
    masses: tuple[np.ndarray, np.ndarray],
    level: tuple[np.ndarray, np.ndarray],
    lower: tuple[np.ndarray, np.ndarray],
    history_probs: np.ndarray,
    costs: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Writes D of every extension of the histories `begin ... end - 1`.

    Probabilities may be 0. An n-gram or history of probability 0 adds nothing to D; if
    only the suffix of an n-gram has probability 0, D is infinite.

    Args:
      offsets: the `trie.child_offsets` of the histories, `[h + 1]`.
      links: index of each n-gram's suffix in the order below, `[n]`.
      masses: the results of `backoff.left_over_masses`, `[h]` each.
      level: probabilities and log-probabilities of the n-grams, `[n]`.
      lower: the same of the order below.
      history_probs: P(h), `[h]`.
      costs: the result, `[n]`.
      begin: the first history.
      end: the history after the last one.
    """
    probs, log_probs = level
    lower_probs, lower_log_probs = lower
    for history in range(begin, end):
        mass, lower_mass = masses[0][history], masses[1][history]
        log_alpha = math.log(mass / lower_mass)
        for ngram in range(offsets[history], offsets[history + 1]):
            prob, suffix = probs[ngram], links[ngram]
            new = math.log((mass + prob) / (lower_mass + lower_probs[suffix]))
            change = mass * (new - log_alpha)
            if prob > 0:
                change += prob * (lower_log_probs[suffix] + new - log_probs[ngram])
            costs[ngram] = 0.0
            if history_probs[history] > 0:
                costs[ngram] = -history_probs[history] * change


@numba.njit(numba.types.void(INTS, INTS, FLOATS, FLOATS_OUT), cache=True, nogil=True)
def raise_costs(
    offsets: np.ndarray,
    links: np.ndarray,
    costs: np.ndarray,
    shorter: np.ndarray,
) -> None:
    """Raises the costs `shorter` of prefixes and suffixes to those of the n-grams."""
    for prefix in range(offsets.size - 1):
        for ngram in range(offsets[prefix], offsets[prefix + 1]):
            cost, suffix = costs[ngram], links[ngram]
            if cost > shorter[prefix]:
                shorter[prefix] = cost
            if cost > shorter[suffix]:
                shorter[suffix] = cost
