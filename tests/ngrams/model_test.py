import dataclasses
import math

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.evaluation import Evaluation, evaluate
from bpd_jax.ngrams.model import NGramModel
from tests.ngrams.helpers import assert_same, tables_of


def slow_log_prob(model, context, token):
    scores, weights = tables_of(model)
    history = tuple(context[max(0, len(context) - model.order + 1) :])
    total = 0.0
    while (*history, token) not in scores:
        if not history:
            return -math.inf
        total += weights.get(history, 0.0)
        history = history[1:]
    return total + scores[(*history, token)]


def test_probabilities_follow_the_back_off_rule(trigrams):
    rng = np.random.default_rng(1)
    contexts = rng.integers(0, trigrams.width, (300, 3))
    contexts[:100, 0] = contexts[:50, 1] = -1  # Contexts may be short.
    tokens = rng.integers(0, trigrams.width, 300)
    expected = [
        slow_log_prob(trigrams, [x for x in context if x >= 0], token)
        for context, token in zip(contexts.tolist(), tokens.tolist(), strict=True)
    ]
    assert -math.inf in expected  # An unseen token, and <s>.
    np.testing.assert_allclose(trigrams.log_probs_of(contexts, tokens), expected)
    some = slice(-20, None)
    for context, token, score in zip(
        contexts[some], tokens[some], expected[some], strict=True
    ):
        assert trigrams.log_prob(context.tolist(), int(token)) == pytest.approx(score)


def test_end_of_text_stands_for_both_boundaries(trigrams, document_model):
    assert document_model.log_prob([0, 1], 9) == trigrams.log_prob([0, 1], trigrams.eos)
    assert document_model.log_prob([0, 9], 1) == trigrams.log_prob([trigrams.bos], 1)
    assert document_model.log_prob([9, 0], 1) == trigrams.log_prob([trigrams.bos, 0], 1)


def test_symbols_outside_the_vocabulary_are_refused(trigrams):
    with pytest.raises(ValueError, match="symbols must be from"):
        trigrams.log_prob([0], trigrams.width)
    for end, message in ((10, "outside the vocabulary"), (0, "unigram of this token")):
        with pytest.raises(UserError, match=message):
            dataclasses.replace(trigrams, end_of_text=end)


def test_perplexity_overflows_to_infinity():
    assert Evaluation(2, 0, -2000.0).perplexity == math.inf
    assert math.isnan(Evaluation(2, 2, 0.0).perplexity)


def test_unknown_tokens_are_counted_and_excluded(trigrams):
    (evaluation,) = evaluate([trigrams], [[0, 9]])
    assert (evaluation.events, evaluation.unknown) == (3, 1)
    expected = trigrams.log_prob([trigrams.bos], 0) + trigrams.log_prob([0, 9], 10)
    assert evaluation.log_prob == pytest.approx(expected)
    smoothed = trigrams.with_unseen_tokens()
    assert evaluate([smoothed], [[0, 9]])[0].unknown == 0


def test_unseen_tokens_change_no_other_probability(document_model):
    smoothed = document_model.with_unseen_tokens(-500)
    assert smoothed.keys[0].tolist() == [*range(9), 10, 11]
    rng = np.random.default_rng(2)
    contexts, tokens = rng.integers(0, 10, (200, 2)), rng.integers(0, 10, 200)
    before = document_model.log_probs_of(contexts, tokens)
    np.testing.assert_array_equal(smoothed.log_probs_of(contexts, tokens), before)


def test_interpolation_with_unigrams(document_model):
    """P = (1 - share) P(w | h) + share P'(w) for every n-gram; the rest backs off."""
    # Every symbol but <s>, the last one, is seen by the other model.
    other = dataclasses.replace(
        document_model,
        log_probs=(
            np.log([*np.arange(1, len(document_model.keys[0])) / 55.0, 1e-300]),
            *document_model.log_probs[1:],
        ),
    )
    mixed = document_model.interpolated(other, 0.25)
    mixed.validate()
    assert mixed.keys[0].tolist() == other.keys[0].tolist()
    for order in (1, 2, 3):
        for *context, token in document_model.ngrams(order).tolist():
            at = np.searchsorted(other.keys[0], token)
            if token == document_model.bos:
                continue
            expected = 0.75 * np.exp(document_model.log_prob(context, token))
            expected += 0.25 * np.exp(other.log_probs[0][at])
            assert np.exp(mixed.log_prob(context, token)) == pytest.approx(expected)
    with pytest.raises(UserError, match="models of one vocabulary"):
        mixed.interpolated(dataclasses.replace(other, vocab_size=12), 0.5)


def test_evaluation_does_not_depend_on_the_block_size(trigrams, corpus, monkeypatch):
    (expected,) = evaluate([trigrams], corpus)
    monkeypatch.setattr("bpd_jax.ngrams.evaluation._BLOCK", 5)
    (actual,) = evaluate([trigrams], iter(corpus))
    assert actual[:2] == expected[:2]
    assert actual.log_prob == pytest.approx(expected.log_prob)
    with pytest.raises(UserError, match=r"sequence 61 holds the token 77"):
        evaluate([trigrams], [*corpus, np.array([0, 77])])
    with pytest.raises(UserError, match="no text to score"):
        evaluate([trigrams], [])


def test_model_is_saved_to_and_loaded_from_a_bucket(trigrams, storage):
    trigrams.save("gs://bpd-test/ngram")
    assert_same(NGramModel.load("gs://bpd-test/ngram"), trigrams)


def test_number_of_tokens_can_be_changed(trigrams, document_model):
    for model in (trigrams, document_model):
        wider = model.with_vocab_size(40)
        assert wider.vocab_size == 40
        wider.validate()
        for context in ([], [1], [2, 3], [model.vocab_size - 1]):
            for token in (0, 3, 9):
                assert wider.log_prob(context, token) == model.log_prob(context, token)
            want = model.log_prob(context, model.eos)
            assert wider.log_prob(context, wider.eos) == want
        assert_same(wider.with_vocab_size(model.vocab_size), model)
    with pytest.raises(UserError, match="has tokens beyond the 2"):
        trigrams.with_vocab_size(2)
