"""Back-off weights: what makes a back-off model sum to one in every context."""

import functools
from collections.abc import Sequence

import numpy as np

from bpd_jax.ngrams import trie

# Natural logarithm of "never", as OpenGrm writes it: the weight of a history that has
# been seen with every symbol of the vocabulary.
NEVER = -99.0

# Masses below this are rounding errors (OpenGrm's limit).
_SMALLEST_MASS = 1e-9


def extension_sums(
    offsets: np.ndarray,
    probs: np.ndarray,
    lower_probs: np.ndarray,
    links: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mass of a history's extensions, after it and after its suffix.

    Args:
      offsets: the `trie.child_offsets` of the h histories of one length, `[h + 1]`.
      probs: `[n]` P(last symbol | history) of the n-grams one symbol longer.
      lower_probs: the same of the n-grams as long as the histories, `[h]`.
      links: the suffix of each n-gram among those, `[n]`.

    Returns:
      `sum P(w | h)` and `sum P(w | suffix of h)`, both `[h]` float64 and over the
      symbols w seen after h.
    """
    from bpd_jax.ngrams import trie_kernels

    sums, lower_sums = np.empty((2, offsets.size - 1))
    fill = functools.partial(
        trie_kernels.fill_child_sums,
        offsets,
        probs,
        lower_probs,
        links,
        sums,
        lower_sums,
    )
    trie.in_threads(fill, offsets)
    return sums, lower_sums


def left_over_masses(
    offsets: np.ndarray,
    probs: np.ndarray,
    lower_probs: np.ndarray,
    links: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a history's extensions leave of its own and its suffix's mass.

    The arguments are those of `extension_sums`; the quotient of the two results is
    the back-off weight.
    """
    masses = extension_sums(offsets, probs, lower_probs, links)
    for mass in masses:
        np.subtract(1, mass, out=mass)
        np.maximum(mass, _SMALLEST_MASS, out=mass)
    return masses


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
        offsets = trie.child_offsets(keys, order, width)
        own, low = left_over_masses(
            offsets, probs[order], probs[order - 1], links[order]
        )
        complete = np.diff(offsets) == events
        weights.append(np.where(complete, NEVER, np.log(own) - np.log(low)))
    return tuple(weights)


def context_sums(
    keys: Sequence[np.ndarray],
    probs: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
    width: int,
) -> list[np.ndarray]:
    """Returns the sum of P(. | h) over all events, for every history of a model.

    With S(h) that sum, E(h) the symbols seen after h and h' the suffix of h,

        S(h) = sum of P(w | h) over E(h)
               + alpha(h) (S(h') - sum of P(w | h') over E(h)),

    so that one pass over the n-grams finds all sums.

    Args:
      keys: per order, the n-grams, with both closures.
      probs: per order, `[n]` P(last symbol | history).
      weights: per order but the highest, `[n]` alpha.
      width: number of symbols.

    Returns:
      For the histories of 0 ... N-1 symbols, `[1]`, `[n]`, ... float64.
    """
    links = trie.suffix_links(keys, width)
    sums = [probs[0].sum(keepdims=True)]
    for order in range(1, len(keys)):
        offsets = trie.child_offsets(keys, order, width)
        own, low = extension_sums(offsets, probs[order], probs[order - 1], links[order])
        shorter = sums[-1][links[order - 1]]
        sums.append(own + weights[order - 1] * (shorter - low))
    return sums
