"""Back-off weights, which normalise a back-off model in every context."""

from collections.abc import Sequence

import numpy as np

from bpd_jax.ngrams import trie

# Logarithm of the back-off weight of a history that has been seen with every symbol of
# the vocabulary, as in OpenGrm.
NEVER = -99.0

# Smaller masses are rounding errors (OpenGrm's limit).
_SMALLEST_MASS = 1e-9


def extension_sums(
    offsets: np.ndarray,
    probs: np.ndarray,
    lower_probs: np.ndarray,
    links: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums the probabilities of each history's extensions.

    Args:
      offsets: the `trie.child_offsets` of the h histories of one length, `[h + 1]`.
      probs: `[n]`, P(last symbol | history) of the n-grams that are one symbol longer
        than the histories.
      lower_probs: `[h]`, the same of the n-grams that are as long as the histories.
      links: `[n]`, index of each n-gram's suffix in `lower_probs`.

    Returns:
      `sum P(w | h)` and `sum P(w | suffix of h)` over the symbols w seen after h, both
      `[h]` float64.
    """
    from bpd_jax.ngrams import trie_kernels

    sums, lower_sums = np.empty((2, offsets.size - 1))
    arguments = (offsets, probs, lower_probs, links, sums, lower_sums)
    trie.in_threads(offsets, trie_kernels.fill_child_sums, *arguments)
    return sums, lower_sums


def left_over_masses(
    offsets: np.ndarray,
    probs: np.ndarray,
    lower_probs: np.ndarray,
    links: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns one minus the sums of `extension_sums`, which takes the same arguments.

    The back-off weight of a history is the first result divided by the second.
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
        mass, lower_mass = left_over_masses(
            offsets, probs[order], probs[order - 1], links[order]
        )
        complete = np.diff(offsets) == events
        log_weights = np.log(mass) - np.log(lower_mass)
        weights.append(np.where(complete, NEVER, log_weights))
    return tuple(weights)


def context_sums(
    keys: Sequence[np.ndarray],
    probs: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
    width: int,
) -> list[np.ndarray]:
    """Returns the sum of P(. | h) over all events, for every history of a model.

    Let S(h) be this sum, E(h) the symbols seen after h, and h' the suffix of h. Then

        S(h) = sum of P(w | h) over E(h)
               + alpha(h) (S(h') - sum of P(w | h') over E(h)),

    so that one pass over the n-grams computes all sums.

    Args:
      keys: per order, the n-grams, closed under prefixes and suffixes.
      probs: per order, `[n]` P(last symbol | history).
      weights: per order but the highest, `[n]` alpha.

    Returns:
      For the histories of 0 ... N-1 symbols, `[1]`, `[n]`, ... float64.
    """
    links = trie.suffix_links(keys, width)
    sums = [probs[0].sum(keepdims=True)]
    for order in range(1, len(keys)):
        offsets = trie.child_offsets(keys, order, width)
        mass, lower_mass = extension_sums(
            offsets, probs[order], probs[order - 1], links[order]
        )
        lower_sums = sums[-1][links[order - 1]]
        sums.append(mass + weights[order - 1] * (lower_sums - lower_mass))
    return sums
