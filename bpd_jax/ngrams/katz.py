"""Katz back-off with Good-Turing discounts, as OpenGrm NGram estimates it.

    P(w | h) = d(c) c(h w) / c(h)                  where c = c(h w) > 0
             = alpha(h) P(w | h without its first symbol)         elsewhere

S. Katz 1987, "Estimation of probabilities from sparse data for the language model
component of a speech recognizer". Unigrams have their maximum-likelihood probabilities;
`<s>` is never predicted.
"""

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import log_backoffs
from bpd_jax.ngrams.counting.counts import (
    NGramCounts,
    round_counts,
    rounded_counts_table,
)
from bpd_jax.ngrams.model import NGramModel

DEFAULT_BINS = 5
MOST_BINS = 1_000_000

# The discount, as in OpenGrm, of counts above the bins and of counts whose Good-Turing
# factor is not in (0, 1), so that every history leaves mass for unseen symbols.
_SMALLEST_DISCOUNT = 0.001

# Relative errors of `NGramCounts.followed`, which `round_counts` rounds, are smaller.
_ROUNDING = 1e-5


def good_turing_discounts(counts: np.ndarray, bins: int = DEFAULT_BINS) -> np.ndarray:
    """Returns the discount factors d of the counts of one order.

    With n_r the number of n-grams seen r times, r* = (r+1) n_{r+1} / n_r and
    m = (k+1) n_{k+1} / n_1, the factor is d_r = (r*/r - m) / (1 - m) for r up to
    k = `bins`. If n-grams seen once were dropped, n_1 is replaced by j n_j, where j is
    the lowest remaining count. A factor outside (0, 1), which occurs in small or
    unusual samples, is replaced by 0.999, the factor of all counts above `bins`.

    Args:
      counts: `[n]` positive counts.
      bins: k, the highest count that is discounted by Good-Turing.

    Returns:
      `[bins + 2]` float64: entry r is the factor of the count r, the last entry that
      of every higher count; entry 0 is not used.
    """
    # n[r] for r = 0 ... bins + 1
    n = np.bincount(counts[counts < bins + 2], minlength=bins + 2)
    factors = np.full(bins + 2, 1 - _SMALLEST_DISCOUNT)
    nonzero = np.flatnonzero(n)
    if not nonzero.size:
        return factors
    lowest = nonzero[0]
    norm = (bins + 1) * n[bins + 1] / (lowest * n[lowest])
    for r in range(1, bins + 1):
        # As in OpenGrm, an empty bin counts as one n-gram.
        factor = (r + 1) * max(n[r + 1], 1) / max(n[r], 1) / r - norm
        if norm < 1:
            factor /= 1 - norm
        if 0 < factor < 1:
            factors[r] = factor
    return factors


def estimate_katz(counts: NGramCounts, bins: int = DEFAULT_BINS) -> NGramModel:
    """Estimates a model that agrees with `ngrammake --method=katz`.

    A history that has been seen with the complete vocabulary cannot back off; its
    discounted mass goes to `</s>`, as in OpenGrm.

    Args:
      counts: counts of orders 1 ... N, with or without minimum counts.
      bins: highest count that is discounted by Good-Turing; OpenGrm's default is 5.
    """
    unigrams = np.where(counts.keys[0] == counts.bos, 0, counts.counts[0])
    if not unigrams.any():
        raise UserError("the counts hold no text: there is no unigram but <s>.")
    probs = [unigrams / unigrams.sum(dtype=np.float64)]
    events = int(np.count_nonzero(unigrams))
    orders = range(2, len(counts.keys) + 1)
    probs += [
        _discounted(counts, order, bins, events)
        for order in progress.bar(orders, label="estimate", unit=" orders")
    ]
    backoffs = log_backoffs(counts.keys, probs, counts.width)
    with np.errstate(divide="ignore"):
        for prob in probs:
            np.log(prob, out=prob)
    return NGramModel(
        vocab_size=counts.vocab_size,
        keys=counts.keys,
        log_probs=tuple(probs),
        log_backoffs=backoffs,
        end_of_text=counts.end_of_text,
    )


def _discounted(counts: NGramCounts, order: int, bins: int, events: int) -> np.ndarray:
    """Returns P(last symbol | history) of all n-grams of an order above 1, `[n]`.

    Args:
      events: number of symbols that can follow a history.
    """
    from bpd_jax.ngrams import trie_kernels

    numbers, width = counts.counts[order - 1], counts.width
    offsets = trie.child_offsets(counts.keys, order - 1, width)
    followed, children = counts.followed[order - 2], np.diff(offsets)
    is_history = children > 0
    begins = offsets[:-1][is_history]
    sums = np.add.reduceat(numbers, begins, dtype=np.float64)
    if (sums > followed[is_history] * (1 + _ROUNDING)).any():
        raise UserError(
            "the counts are inconsistent: the extensions of a history are more "
            "frequent than the history; count again."
        )
    table = rounded_counts_table()
    probs = np.empty(numbers.size)
    high = np.flatnonzero(numbers >= table.size)
    probs[high] = round_counts(numbers[high])
    discounts = good_turing_discounts(numbers, bins)
    arguments = (numbers, offsets, followed, discounts, table, probs)
    trie.in_threads(offsets, trie_kernels.fill_probs, *arguments)

    complete = np.flatnonzero(children == events)
    if complete.size:
        unassigned = [
            max(0.0, 1 - probs[offsets[h] : offsets[h + 1]].sum())
            for h in complete.tolist()
        ]
        eos = np.array(counts.eos)
        ends = trie.find(counts.keys[order - 1], complete, eos, width)
        if (ends < 0).any():
            raise UserError(
                "the counts lack </s>, which gets the remaining probability after a "
                "history that all other symbols follow: count complete sequences."
            )
        probs[ends] += unassigned
    return probs
