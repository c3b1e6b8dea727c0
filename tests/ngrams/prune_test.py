import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import log_backoffs
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.prune import prune, relative_entropies
from tests.ngrams.helpers import ngram_set


def test_remaining_ngrams_keep_their_probability(trigrams):
    pruned = prune(trigrams, trigrams.sizes[0] + 40)
    for order in range(1, pruned.order + 1):
        rows = pruned.ngrams(order)
        before = trigrams.log_probs_of(rows[:, :-1], rows[:, -1])
        assert (pruned.log_probs[order - 1] == before).all()


def test_cost_of_a_trigram_is_the_relative_entropy_of_its_removal(trigrams):
    # No n-gram depends on a trigram of a trigram model, so its cost is the relative
    # entropy D, summed here over the vocabulary from the two models' probabilities.
    costs = relative_entropies(trigrams)[1]
    rows = trigrams.ngrams(3)
    probs = [np.exp(log_prob) for log_prob in trigrams.log_probs]
    events = np.append(np.arange(10), trigrams.eos)
    for index in range(0, len(rows), 17):
        keep = np.arange(len(rows)) != index
        keys = (*trigrams.keys[:2], trigrams.keys[2][keep])
        remaining = [*probs[:2], probs[2][keep]]
        pruned = NGramModel(
            vocab_size=10,
            keys=keys,
            log_probs=(*trigrams.log_probs[:2], trigrams.log_probs[2][keep]),
            log_backoffs=log_backoffs(keys, remaining, trigrams.width),
        )
        history = np.tile(rows[index, :2], (events.size, 1))
        before = trigrams.log_probs_of(history, events)
        after = pruned.log_probs_of(history, events)
        possible = np.isfinite(before)
        before, after = before[possible], after[possible]
        change = (np.exp(before) * (before - after)).sum()
        first, second = rows[index, :2].tolist()
        start = trigrams.eos if first == trigrams.bos else first
        weight = trigrams.log_prob([], start) + trigrams.log_prob([first], second)
        expected = np.exp(weight) * change
        assert costs[index] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_theta_is_a_threshold_on_the_costs(trigrams):
    costs = relative_entropies(trigrams)
    theta = float(np.expm1(np.median(np.concatenate(costs))))
    pruned = prune(trigrams, theta=theta)
    expected = [
        set(map(tuple, trigrams.ngrams(order)[np.expm1(cost) > theta].tolist()))
        for order, cost in enumerate(costs, start=2)
    ]
    for order, rows in enumerate(expected, start=2):
        assert set(map(tuple, pruned.ngrams(order).tolist())) == rows
    assert prune(trigrams, theta=1e9).sizes == trigrams.sizes[:1]
    limited = prune(trigrams, trigrams.sizes[0] + 9, theta=theta)
    # The limit is reached, up to ties.
    assert 4 < sum(limited.sizes) - trigrams.sizes[0] <= 9
    assert ngram_set(limited) <= ngram_set(pruned)
    with pytest.raises(UserError, match="never pruned"):
        prune(trigrams, 10)


def limited_by_definition(model, limits):
    """The n-grams that remain under limits per order, if there are no ties."""
    remaining = {tuple(row) for row in model.ngrams(1).tolist()}
    for order, cost in enumerate(relative_entropies(model), start=2):
        rows = [tuple(row) for row in model.ngrams(order).tolist()]
        candidates = [
            (-float(number), row)
            for number, row in zip(cost, rows, strict=True)
            if row[:-1] in remaining and row[1:] in remaining
        ]
        limit = limits[order - 2]
        if limit is not None and len(candidates) > limit:
            threshold = sorted(candidates)[limit][0]
            candidates = [pair for pair in candidates if pair[0] < threshold]
        remaining |= {row for _, row in candidates}
    return remaining


@pytest.mark.parametrize("limits", [[10, None], [None, 7], [20, 5], [0, 3]])
def test_limits_per_order(trigrams, limits):
    pruned = prune(trigrams, max_per_order=limits)
    assert ngram_set(pruned) == limited_by_definition(trigrams, limits)
    for size, limit in zip(pruned.sizes[1:], limits, strict=False):
        assert limit is None or size <= limit
    pruned.validate(1e-9)


def test_limits_that_are_not_exceeded_prune_nothing(trigrams):
    assert prune(trigrams) is trigrams
    assert prune(trigrams, sum(trigrams.sizes)) is trigrams
    assert prune(trigrams, max_per_order=[10**6]) is trigrams
    assert prune(trigrams, max_per_order=[None, None, 5]) is trigrams


@pytest.mark.parametrize(
    "limits",
    [{"theta": 1e-3}, {"max_ngrams": 14}, {"max_ngrams": 9}, {"max_per_order": [5, 3]}],
)
def test_pruned_model_with_zero_probabilities_is_closed(limits):
    # Probability 0: a unigram, the suffix of a trigram, a prefix, and a trigram.
    # The bigrams are 0 1, 0 2, 1 2, 2 0 and 2 3; the trigrams 0 1 2, 0 2 0, 1 2 3 and
    # 2 0 1.
    keys = [0, 1, 2, 3, 4, 5], [1, 2, 8, 12, 15], [2, 6, 15, 19]
    probs = [0.3, 0.3, 0.2, 0, 0.2, 0], [0.6, 0.2, 0, 0, 0.7], [0.9, 0.1, 0.5, 0.4]
    with np.errstate(divide="ignore"):
        log_probs = tuple(map(np.log, probs))
    backoffs = np.zeros(6), np.zeros(5)
    model = NGramModel(4, tuple(map(np.array, keys)), log_probs, backoffs)
    costs = relative_entropies(model)
    assert not any(np.isnan(cost).any() for cost in costs)
    # Only the trigrams themselves give `0 1 2` and `0 2 0` a probability.
    assert np.isposinf(costs[1]).tolist() == [True, True, False, False]
    pruned = prune(model, **limits)
    links = trie.suffix_links(pruned.keys, pruned.width)
    assert all((link >= 0).all() for link in links)
    assert ((0, 1, 2) in ngram_set(pruned)) == (limits != {"max_ngrams": 9})
    for weights in pruned.log_backoffs:
        assert np.isfinite(weights).all()
