"""Relative-entropy pruning: removes the n-grams whose removal changes the model least.

A. Stolcke 1998, "Entropy-based pruning of backoff language models". Removing a
single n-gram h w changes the back-off weight of h from alpha to

    alpha' = (1 - sum of the other P(. | h)) / (1 - sum of the other P(. | h')),

where h' is h without its first symbol, and the model by

    D = -P(h) { P(w|h) [log P(w|h') + log alpha' - log P(w|h)]
                + (1 - sum P(. | h)) [log alpha' - log alpha] }       (nats).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import left_over_masses, log_backoffs
from bpd_jax.ngrams.model import NGramModel


def relative_entropies(model: NGramModel) -> list[np.ndarray]:
    """Returns the cost of removing each n-gram of orders 2 ... N, `[n]` nats.

    Removing an n-gram also removes the n-grams of which it is the prefix or suffix. Its
    cost is therefore the maximum of its own D and theirs (as in OpenGrm's
    `ngramshrink`). The n-grams above a threshold are then closed under prefixes and
    suffixes.
    """
    from bpd_jax.ngrams import trie_kernels

    keys, width = model.keys, model.width
    links = trie.suffix_links(keys, width)
    probs = [np.exp(log_prob) for log_prob in model.log_probs]
    # P(h): the product of the conditional probabilities along h; P(<s>) = P(</s>).
    root = np.zeros(1, np.int64)
    eos, bos = (
        trie.find(keys[0], root, np.array([symbol]), width)[0]
        for symbol in (model.eos, model.bos)
    )
    history_probs = probs[0].copy()
    if bos >= 0 and eos >= 0:
        history_probs[bos] = probs[0][eos]

    costs: list[np.ndarray] = []
    for order in progress.bar(range(1, model.order), label="prune", unit=" orders"):
        offsets = trie.child_offsets(keys, order, width)
        cost = np.empty(keys[order].size)
        trie.in_threads(
            offsets,
            trie_kernels.fill_relative_entropies,
            offsets,
            links[order],
            left_over_masses(offsets, probs[order], probs[order - 1], links[order]),
            (probs[order], model.log_probs[order]),
            (probs[order - 1], model.log_probs[order - 1]),
            history_probs,
            cost,
        )
        costs.append(cost)
        if order + 1 < model.order:
            history_probs = np.repeat(history_probs, np.diff(offsets)) * probs[order]
    for order in range(model.order - 1, 1, -1):
        shorter, cost = costs[order - 2], costs[order - 1]
        np.maximum.at(shorter, keys[order] // width, cost)
        np.maximum.at(shorter, links[order], cost)
    return costs


def prune(
    model: NGramModel,
    max_ngrams: int | None = None,
    *,
    theta: float | None = None,
    max_per_order: Sequence[int | None] | None = None,
) -> NGramModel:
    """Returns a model with fewer n-grams, normalised again.

    An n-gram is removed if any limit requires it. All costs are those in the unpruned
    model, so every limit is a threshold on costs, n-grams of equal cost are kept or
    removed together, and the order of processing makes no difference. Unigrams are
    never pruned. The prefix and the suffix of a retained n-gram are retained:

    1. `theta` and `max_ngrams` retain them, because an n-gram never costs more than its
       prefix or suffix.
    2. `max_per_order` is applied from bigrams up: each order drops the n-grams whose
       prefix or suffix was removed, then the cheapest ones until the limit is met.
    3. `max_ngrams` then applies to the remaining n-grams.

    Args:
      model: a normalised back-off model.
      max_ngrams: maximum number of n-grams of all orders, counted as in ARPA files,
        that is with `<s>`.
      theta: removes n-grams whose removal raises the perplexity by this factor or less,
        e^D - 1 <= theta, as in SRILM's `-prune` and OpenGrm's `--theta`; for common
        values, such as 1e-8, this is D in nats.
      max_per_order: per order from the bigrams up, at most this many n-grams; None for
        no limit. Limits of orders that the model lacks are ignored.
    """
    unigrams = model.sizes[0]
    if max_ngrams is not None and max_ngrams < unigrams:
        raise UserError(
            f"max_ngrams is {max_ngrams}, but the model has {unigrams} unigrams, which "
            "are never pruned: set max_ngrams to at least that number."
        )
    limits = [*(max_per_order or ())][: model.order - 1]
    limits += [None] * (model.order - 1 - len(limits))
    within_limits = all(
        limit is None or size <= limit
        for size, limit in zip(model.sizes[1:], limits, strict=True)
    )
    if within_limits and theta is None and sum(model.sizes) <= (max_ngrams or math.inf):
        return model
    costs = relative_entropies(model)
    threshold = -math.inf if theta is None else math.log1p(theta)
    if not within_limits:
        _apply_order_limits(model, costs, limits)
    if max_ngrams is not None:
        max_kept = max_ngrams - unigrams
        threshold = max(threshold, _threshold(np.concatenate(costs), max_kept))
    keep = [np.ones(unigrams, bool), *(cost > threshold for cost in costs)]
    keys = trie.select(model.keys, keep, model.width)
    log_probs = tuple(
        log_prob[mask]
        for log_prob, mask in zip(model.log_probs, keep, strict=True)
        if mask.any()
    )
    probs = [np.exp(log_prob) for log_prob in log_probs]
    weights = log_backoffs(keys, probs, model.width)
    return dataclasses.replace(
        model, keys=keys, log_probs=log_probs, log_backoffs=weights
    )


def _threshold(costs: np.ndarray, limit: int) -> float:
    """Returns the smallest threshold that at most `limit` costs exceed."""
    if costs.size <= limit:
        return -math.inf
    last = costs.size - limit - 1
    return float(np.partition(costs, last)[last])


def _apply_order_limits(
    model: NGramModel, costs: list[np.ndarray], limits: Sequence[int | None]
) -> None:
    """Sets the costs of the n-grams that order limits drop to minus infinity."""
    links = trie.suffix_links(model.keys, model.width)
    for index, limit in enumerate(limits):
        cost = costs[index]
        if index:
            dropped = np.isneginf(costs[index - 1])
            offsets = trie.child_offsets(model.keys, index + 1, model.width)
            cost[np.repeat(dropped, np.diff(offsets))] = -math.inf
            cost[dropped[links[index + 1]]] = -math.inf
        if limit is not None:
            cost[cost <= _threshold(cost, limit)] = -math.inf
