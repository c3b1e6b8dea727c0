"""Static linear interpolation of two back-off models.

    P(w | h) = lambda P1(w | h) + (1 - lambda) P2(w | h)

for every n-gram h w that is in either model; a model that lacks it backs off. The
back-off weights are then computed so that every context sums to one. SRILM's `-mix-lm`
does the same, and so does OpenGrm's `ngrammerge --method=model_merge` for normalised
models.

The mixture is exact for the n-grams of the union. It is approximate for a symbol that
neither model has seen after h: its probability is alpha(h) P(w | h without its first
symbol), with one weight for all such symbols. Their total probability is exact. lambda
does not depend on the history (unlike SRILM's `-bayes`).
"""

import dataclasses
import math

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import log_backoffs
from bpd_jax.ngrams.model import NGramModel


def interpolate(first: NGramModel, second: NGramModel, weight: float) -> NGramModel:
    """Returns `weight` times the first model plus `1 - weight` times the second.

    Args:
      first: a normalised model.
      second: a normalised model of the same vocabulary; its order may differ.
      weight: lambda, above 0 and below 1.
    """
    if not 0 < weight < 1:
        raise UserError(f"the weight is {weight}: it must lie between 0 and 1.")
    if first.vocab_size != second.vocab_size or first.end_of_text != second.end_of_text:
        raise UserError(
            "the two models differ in their vocabularies: sizes "
            f"{first.vocab_size} and {second.vocab_size}, end-of-text tokens "
            f"{first.end_of_text} and {second.end_of_text}; read both from ARPA or "
            ".fst files with the same --vocab_size and --end_of_text."
        )
    width = first.width
    keys = _union(first, second)
    links = trie.suffix_links(keys, width)
    log_probs = [
        np.logaddexp(math.log(weight) + log_prob, math.log1p(-weight) + other)
        for log_prob, other in zip(
            _log_probs_at(first, keys, links),
            _log_probs_at(second, keys, links),
            strict=True,
        )
    ]
    probs = [np.exp(log_prob) for log_prob in log_probs]
    return dataclasses.replace(
        first,
        keys=keys,
        log_probs=tuple(log_probs),
        log_backoffs=log_backoffs(keys, probs, width),
    )


def _union(first: NGramModel, second: NGramModel) -> trie.Keys:
    """Returns the n-grams that are in either model."""
    keys: list[np.ndarray] = []
    # Per model, the index in the union of each n-gram of the order below.
    indices = [np.zeros(1, np.int64), np.zeros(1, np.int64)]
    for order in range(max(first.order, second.order)):
        renumbered = []
        for model, index in zip((first, second), indices, strict=True):
            if order < model.order:
                parents, symbols = np.divmod(model.keys[order], model.width)
                renumbered.append(index[parents] * model.width + symbols)
            else:
                renumbered.append(np.zeros(0, np.int64))
        # A stable sort of two sorted arrays merges them.
        merged = np.sort(np.concatenate(renumbered), kind="stable")
        keys.append(merged[np.append(True, merged[1:] != merged[:-1])])
        indices = [np.searchsorted(keys[-1], part) for part in renumbered]
    return tuple(keys)


def _log_probs_at(
    model: NGramModel, keys: trie.Keys, links: list[np.ndarray]
) -> list[np.ndarray]:
    """Returns a model's log-probabilities of the n-grams `keys`, per order."""
    width = model.width
    result: list[np.ndarray] = []
    # The index in the model of each n-gram of the order below; -1 for missing ones.
    indices = np.zeros(1, np.int64)
    for order in range(len(keys)):
        parents, symbols = np.divmod(keys[order], width)
        histories = indices[parents]
        if order < model.order:
            offsets = trie.child_offsets(model.keys, order, width)
            indices = trie.find(model.keys[order], histories, symbols, width, offsets)
            exists = indices >= 0
        else:
            indices = np.full(keys[order].size, -1)
            exists = np.zeros(indices.size, bool)
        score = np.full(indices.size, -np.inf)
        if order:
            score = result[-1][links[order]]
            if order <= len(model.log_backoffs):
                weights = model.log_backoffs[order - 1][histories]
                score = score + np.where(histories >= 0, weights, 0.0)
        if order < model.order:
            score[exists] = model.log_probs[order][indices[exists]]
        result.append(score)
    return result
