"""Tests of bpd_jax.ngrams.prune."""

import numpy as np
import pytest

from bpd_jax.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import log_backoffs
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.prune import prune, relative_entropies


def ngram_set(model: NGramModel) -> set[tuple[int, ...]]:
    return {
        tuple(row)
        for order in range(1, model.order + 1)
        for row in model.ngrams(order).tolist()
    }


@pytest.mark.parametrize("extra", [0, 1, 7, 40, 100])
def test_a_pruned_model_fits_and_is_closed(trigrams: NGramModel, extra: int) -> None:
    limit = trigrams.sizes[0] + extra
    pruned = prune(trigrams, limit)
    assert sum(pruned.sizes) <= limit
    kept = ngram_set(pruned)
    assert kept <= ngram_set(trigrams)
    assert (pruned.keys[0] == trigrams.keys[0]).all()
    for gram in kept:
        if len(gram) > 1:
            assert {gram[1:], gram[:-1]} <= kept


def test_what_stays_keeps_its_probability(trigrams: NGramModel) -> None:
    pruned = prune(trigrams, trigrams.sizes[0] + 40)
    for order in range(1, pruned.order + 1):
        rows = pruned.ngrams(order)
        before = trigrams.log_probs_of(rows[:, :-1], rows[:, -1])
        assert (pruned.log_probs[order - 1] == before).all()


def test_a_limit_above_the_size_prunes_nothing(trigrams: NGramModel) -> None:
    assert prune(trigrams, sum(trigrams.sizes)) is trigrams


def test_a_limit_below_the_unigrams_is_refused(trigrams: NGramModel) -> None:
    with pytest.raises(UserError, match="never pruned"):
        prune(trigrams, trigrams.sizes[0] - 1)


def test_the_cost_of_a_trigram_is_the_relative_entropy_of_losing_it(
    trigrams: NGramModel,
) -> None:
    # No n-gram needs a trigram of a trigram model, so its cost is its own D: summed
    # here over the vocabulary from the two models' probabilities.
    costs = relative_entropies(trigrams)[1]
    rows = trigrams.ngrams(3)
    probs = [np.exp(log_prob) for log_prob in trigrams.log_probs]
    events = np.append(np.arange(10), trigrams.eos)
    for place in range(0, len(rows), 17):
        keep = np.arange(len(rows)) != place
        keys = (*trigrams.keys[:2], trigrams.keys[2][keep])
        rest = [*probs[:2], probs[2][keep]]
        without = NGramModel(
            vocab_size=10,
            keys=keys,
            log_probs=(*trigrams.log_probs[:2], trigrams.log_probs[2][keep]),
            log_backoffs=log_backoffs(keys, rest, trigrams.width),
        )
        history = np.tile(rows[place, :2], (events.size, 1))
        before = trigrams.log_probs_of(history, events)
        after = without.log_probs_of(history, events)
        possible = np.isfinite(before)
        before, after = before[possible], after[possible]
        change = (np.exp(before) * (before - after)).sum()
        first, second = rows[place, :2].tolist()
        start = trigrams.eos if first == trigrams.bos else first
        weight = trigrams.log_prob([], start) + trigrams.log_prob([first], second)
        expected = np.exp(weight) * change
        assert costs[place] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_history_costs_at_least_what_its_extensions_cost(
    trigrams: NGramModel,
) -> None:
    bigrams, longer = relative_entropies(trigrams)
    links = trie.suffix_links(trigrams.keys, trigrams.width)
    assert (bigrams[trigrams.keys[2] // trigrams.width] >= longer).all()
    assert (bigrams[links[2]] >= longer).all()
