"""Back-off weights: what makes a back-off model sum to one in every context."""

from collections.abc import Sequence

import numpy as np

from bpd_jax.ngrams import trie

# Natural logarithm of "never", as OpenGrm writes it: the weight of a history that has
# been seen with every symbol of the vocabulary.
NEVER = -99.0

# Masses below this are rounding errors (OpenGrm's limit).
_SMALLEST_MASS = 1e-9


def left_over_masses(
    keys: Sequence[np.ndarray],
    probs: Sequence[np.ndarray],
    links: Sequence[np.ndarray],
    order: int,
    width: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a history's extensions leave of its own and its suffix's mass.

    Args:
      keys: per order, the n-grams.
      probs: per order, `[n]` P(last symbol | history).
      links: the suffix links of `keys`.
      order: of the histories, 1 ... N-1.
      width: number of symbols.

    Returns:
      `1 - sum P(w | h)` and `1 - sum P(w | suffix of h)`, both `[n]` and over the
      symbols w seen after h; their quotient is the back-off weight.
    """
    histories = keys[order] // width
    number = keys[order - 1].size
    own = 1 - np.bincount(histories, probs[order], number)
    low = 1 - np.bincount(histories, probs[order - 1][links[order]], number)
    return np.maximum(own, _SMALLEST_MASS), np.maximum(low, _SMALLEST_MASS)


def log_backoffs(
    keys: Sequence[np.ndarray], probs: Sequence[np.ndarray], width: int
) -> tuple[np.ndarray, ...]:
    """Returns the natural logarithms of the back-off weights of orders 1 ... N-1.

    A history without extensions has weight 1. One that has been seen with every
    symbol has `NEVER`.
    """
    links = trie.suffix_links(keys, width)
    events = int(np.count_nonzero(probs[0]))
    weights = []
    for order in range(1, len(keys)):
        own, low = left_over_masses(keys, probs, links, order, width)
        complete = trie.child_counts(keys, order, width) == events
        weights.append(np.where(complete, NEVER, np.log(own) - np.log(low)))
    return tuple(weights)
