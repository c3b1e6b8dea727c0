"""Tests of bpd_jax.ngrams.states."""

import numpy as np
import pytest

from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.prune import prune
from bpd_jax.ngrams.states import StateTable


def histories(model):
    """The histories in the order of their states, by the definition."""
    known = {()}
    for order in range(2, model.order + 1):
        known.update(tuple(row[:-1]) for row in model.ngrams(order).tolist())
    if model.order > 1:
        known.add((model.bos,))
    return sorted(known, key=lambda history: (len(history), history))


def state_by_definition(model, tokens):
    known = histories(model)
    tokens = [model.bos if token == model.end_of_text else token for token in tokens]
    for start in range(len(tokens) + 1):
        if tuple(tokens[start:]) in known:
            return known.index(tuple(tokens[start:]))
    raise AssertionError("the empty history is always there")


@pytest.fixture(params=["trigrams", "document_model", "pruned", "unigrams", "no start"])
def model(request, trigrams):
    if request.param == "pruned":
        return prune(trigrams, trigrams.sizes[0] + 30)
    if request.param == "unigrams":
        return prune(trigrams, trigrams.sizes[0])
    if request.param == "no start":
        # No remaining bigram begins with <s>.
        sequences = [[0, 1, 2, 3, 4], *([[token] for token in range(5)] * 3)]
        unpruned = estimate_katz(count_ngrams(sequences, order=2))
        keep = unpruned.keys[1] // unpruned.width != np.searchsorted(
            unpruned.keys[0], unpruned.bos
        )
        return NGramModel(
            unpruned.vocab_size,
            (unpruned.keys[0], unpruned.keys[1][keep]),
            (unpruned.log_probs[0], unpruned.log_probs[1][keep]),
            unpruned.log_backoffs,
        )
    return request.getfixturevalue(request.param)


def test_states_are_numbered_by_length_and_then_by_symbols(model):
    table = StateTable(model)
    known = histories(model)
    assert table.num_states == len(known)
    for length in range(1, model.order):
        for row, number in zip(
            model.ngrams(length).tolist(), table.numbers[length], strict=True
        ):
            expected = known.index(tuple(row)) if tuple(row) in known else -1
            assert number == expected
    start = known.index((model.bos,)) if model.order > 1 else 0
    assert table.start == start


def test_backing_off_drops_the_first_symbol(model):
    table = StateTable(model)
    for state, history in enumerate(histories(model)):
        expected = state_by_definition(model, list(history[1:]))
        assert table.backoff_states[state] == expected
        if history:
            index = np.flatnonzero((model.ngrams(len(history)) == history).all(axis=1))
            weight = model.log_backoffs[len(history) - 1][index[0]]
            assert table.backoff_weights[state] == weight


def test_reached_is_the_longest_history_after_an_ngram(model):
    table = StateTable(model)
    for order in range(1, model.order + 1):
        for row, state in zip(
            model.ngrams(order).tolist(), table.reached[order], strict=True
        ):
            assert state == state_by_definition(model, row)


def test_of_history_is_the_longest_known_suffix(model):
    table = StateTable(model)
    rng = np.random.default_rng(3)
    for length in range(6):
        for _ in range(30):
            tokens = rng.integers(0, model.vocab_size, length).tolist()
            assert table.of_history(tokens) == state_by_definition(model, tokens)
    assert table.of_history([model.bos]) == table.start
    assert table.of_history(np.array([0, 1], np.int32)) == state_by_definition(
        model, [0, 1]
    )
