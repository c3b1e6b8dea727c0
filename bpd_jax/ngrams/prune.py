"""Relative-entropy pruning: the n-grams that change the model least go first.

A. Stolcke 1998, "Entropy-based pruning of backoff language models". For each n-gram
h w alone, taking it out changes the back-off weight of h from alpha to

    alpha' = (1 - sum of the other P(. | h)) / (1 - sum of the other P(. | h')),

where h' is h without its first symbol, and the model by

    D = -P(h) { P(w|h) [log P(w|h') + log alpha' - log P(w|h)]
                + (1 - sum P(. | h)) [log alpha' - log alpha] }       (nats).
"""

import dataclasses

import numpy as np

from bpd_jax import progress
from bpd_jax.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import left_over_masses, log_backoffs
from bpd_jax.ngrams.model import NGramModel


def relative_entropies(model: NGramModel) -> list[np.ndarray]:
    """Returns for every n-gram of orders 2 ... N what losing it costs, `[n]` nats.

    Losing an n-gram means to lose those that need it, of which it is the prefix or
    the suffix; its cost is therefore the highest of its own D and theirs (as in
    OpenGrm's `ngramshrink`), and a threshold on costs leaves a closed set.
    """
    keys, width = model.keys, model.width
    links = trie.suffix_links(keys, width)
    probs = [np.exp(log_prob) for log_prob in model.log_probs]
    # P(h): the product of the conditional probabilities along h; P(<s>) = P(</s>).
    none = np.zeros(1, np.int64)
    eos, bos = (
        trie.find(keys[0], none, np.array([symbol]), width)[0]
        for symbol in (model.eos, model.bos)
    )
    history_probs = probs[0].copy()
    if bos >= 0 and eos >= 0:
        history_probs[bos] = probs[0][eos]

    costs = []
    for order in progress.bar(range(1, model.order), label="prune", unit=" orders"):
        own, low = left_over_masses(keys, probs, links, order, width)
        history = keys[order] // width
        prob, low_prob = probs[order], probs[order - 1][links[order]]
        own, low = own[history], low[history]
        log_alpha = np.log((own + prob) / (low + low_prob))
        change = prob * (np.log(low_prob) + log_alpha - np.log(prob))
        change += own * (log_alpha - np.log(own / low))
        costs.append(-history_probs[history] * change)
        history_probs = history_probs[history] * prob
    for order in range(model.order - 1, 1, -1):
        np.maximum.at(costs[order - 2], keys[order] // width, costs[order - 1])
        np.maximum.at(costs[order - 2], links[order], costs[order - 1])
    return costs


def prune(model: NGramModel, max_ngrams: int) -> NGramModel:
    """Returns a model of at most `max_ngrams` n-grams, normalised again.

    All costs are those in the whole model, so the result depends on `max_ngrams` only
    through a threshold; n-grams of equal cost stay or go together. Unigrams are never
    pruned, and neither is a prefix or a suffix of an n-gram that stays.

    Args:
      model: any back-off model.
      max_ngrams: counted as ARPA files do, all orders and `<s>` included.

    Raises:
      UserError: there are more unigrams than that.
    """
    unigrams = model.sizes[0]
    if max_ngrams < unigrams:
        raise UserError(
            f"max_ngrams is {max_ngrams}, but the model has {unigrams} unigrams, which "
            "are never pruned: ask for at least that many."
        )
    if sum(model.sizes) <= max_ngrams:
        return model
    costs = relative_entropies(model)
    every = np.concatenate(costs)
    last = every.size - (max_ngrams - unigrams) - 1
    threshold = np.partition(every, last)[last]
    keep = [np.ones(unigrams, bool), *(cost > threshold for cost in costs)]

    keys = trie.select(model.keys, keep, model.width)
    log_probs = tuple(
        log_prob[mask]
        for log_prob, mask in zip(model.log_probs, keep, strict=True)
        if mask.any()
    )
    probs = [np.exp(log_prob) for log_prob in log_probs]
    return dataclasses.replace(
        model,
        keys=keys,
        log_probs=log_probs,
        log_backoffs=log_backoffs(keys, probs, model.width),
    )
