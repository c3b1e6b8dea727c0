"""Scores equal those of a softmax over all logits, and those computed by hand."""

import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.evaluation import scoring
from bpd_jax.evaluation.scoring import (
    Score,
    passage_scores,
    score_texts,
    split_last_word,
    windows,
)
from tests.decoding.random_models import make_model, read_texts

LONGEST, VOCAB = 150, 13


@pytest.fixture(scope="module")
def model():
    """Functions and parameters of a model of 150 tokens."""
    return make_model(block_size=2, num_layers=1, max_length=LONGEST)


def logits_after(model, tokens):
    """All logits of one text, `[T, V]`, without batches, chunks or windows."""
    padded = jnp.pad(jnp.asarray(tokens), (0, LONGEST - len(tokens)))[None]
    return np.asarray(read_texts(model, padded)[0][0, : len(tokens)], np.float64)


def expected(model, tokens, count):
    """The score by its definition."""
    logits = logits_after(model, tokens[:-1])[len(tokens) - 1 - count :]
    targets = tokens[len(tokens) - count :]
    peak = logits.max(-1, keepdims=True)
    log_probs = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
    log_prob = log_probs[np.arange(count), targets].sum()
    return Score(float(log_prob), bool((logits.argmax(-1) == targets).all()))


def scores(model, texts, **options):
    by_index = dict(score_texts(model, texts, **options))
    assert sorted(by_index) == list(range(len(texts)))
    return [by_index[index] for index in range(len(texts))]


def assert_alike(actual, wanted):
    assert [s.is_greedy for s in actual] == [s.is_greedy for s in wanted]
    np.testing.assert_allclose(
        [s.log_prob for s in actual], [s.log_prob for s in wanted], rtol=1e-5, atol=1e-4
    )


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(1)
    cases = [(2, 1), (40, 3), (7, 6), (151, 150), (33, 1), (100, 70), (33, 32), (5, 2)]
    return [(rng.integers(0, VOCAB, length), count) for length, count in cases]


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_scores_equal_a_softmax_over_all_logits(model, texts, batch_size):
    wanted = [expected(model, *text) for text in texts]
    assert_alike(scores(model, texts, batch_size=batch_size), wanted)
    assert wanted[3].log_prob < -100  # 150 tokens: more than one chunk


def test_greedy_continuations_are_recognised(model):
    tokens = [5, 3]
    for _ in range(6):
        tokens.append(int(logits_after(model, tokens)[-1].argmax()))
    non_greedy = [*tokens[:-1], (tokens[-1] + 1) % VOCAB]
    texts = [
        (np.array(tokens), 6),
        (np.array(non_greedy), 6),
        (np.array(non_greedy[:-1]), 5),
    ]
    greedy = [score.is_greedy for score in scores(model, texts, batch_size=2)]
    assert greedy == [True, False, True]


def test_shared_inputs_are_processed_once(model, monkeypatch):
    processed = []
    score_batch = scoring._score_batch

    def spy(model, rows, asked, batch):
        processed.extend(rows)
        return score_batch(model, rows, asked, batch)

    monkeypatch.setattr(scoring, "_score_batch", spy)
    question = list(range(9))
    texts = [(np.array([*question, answer]), 1) for answer in (3, 7, 11)]
    texts.append((np.array([*question, 3]), 4))
    assert_alike(scores(model, texts), [expected(model, *text) for text in texts])
    assert len(processed) == 1


def test_tokens_outside_the_vocabulary_are_refused(model):
    texts = [(np.array([1, 2]), 1), (np.array([VOCAB, 1]), 1)]
    with pytest.raises(
        UserError, match=f"text 2 has token ids outside 0 … {VOCAB - 1}"
    ):
        scores(model, texts)


def test_long_text_is_scored_in_windows(model):
    text = np.random.default_rng(2).integers(0, VOCAB, 11)
    parts = [expected(model, text[0:5], 4), expected(model, text[4:9], 4)]
    parts.append(expected(model, text[6:11], 2))
    [score] = scores(model, [(text, 10)], max_length=4, batch_size=2)
    assert score.log_prob == pytest.approx(sum(part.log_prob for part in parts))
    # A long context is truncated on the left.
    assert_alike(
        scores(model, [(text, 2)], max_length=4), [expected(model, text[6:], 2)]
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 12))
def test_every_token_is_scored_once_with_maximal_context(length, count, max_length):
    count = min(count, length - 1)
    scored = []
    for inputs, targets in windows(np.arange(length), count, max_length):
        assert 1 <= len(targets) <= len(inputs) <= max_length
        last = targets[-1]
        assert inputs.tolist() == list(range(max(0, last - max_length), last))
        scored += targets.tolist()
    assert scored == list(range(length - count, length))


PIECES = ["<", "th", "e", " ca", " s", "t", "at"]
WORDS = {"the": [1, 2], " cat": [3, 5], " sat": [4, 6]}

# What follows `<`, `th`, `e` and so on: column j is the probability of piece j.
BIGRAMS = np.array(
    [
        [0.0, 0.9, 0.0, 0.1, 0.0, 0.0, 0.0],
        [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.6, 0.4, 0.0, 0.0],
        [0.0, 0.0, 0.2, 0.0, 0.0, 0.8, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.7],
        [0.0, 0.0, 0.0, 0.25, 0.75, 0.0, 0.0],
        [0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0],
    ]
)


@flax.struct.dataclass
class Bigrams:
    """Substitute for `Model`, whose hidden state is the token."""

    mesh = None

    table: jax.Array

    config = types.SimpleNamespace(
        trunk=types.SimpleNamespace(max_length=64, vocab_size=len(PIECES))
    )

    def forward(self, tokens, positions, mask):
        return jax.nn.one_hot(tokens, len(PIECES)), None

    def next_token_logits(self, hidden):
        return hidden @ self.table


def encode(text):
    ids = []
    while text:
        [word] = [word for word in WORDS if text.startswith(word)]
        ids += WORDS[word]
        text = text[len(word) :]
    return ids


def scores_of_passages(*passages, **options):
    model = Bigrams(jnp.log(jnp.maximum(BIGRAMS, 1e-30)))
    return passage_scores(model, encode, passages, **options)


def test_scores_of_passages_computed_by_hand():
    """Tokens and their probabilities after one another:

        th e(1) _ca(0.6) t(0.8) _s(0.75) at(0.7)
        th e(1) _s(0.4) at(0.7)

    Greedy decoding writes `_s at` after `the cat`, and `_ca` after `the`.
    """
    first, second = scores_of_passages("the cat sat", "the sat")
    assert first == {
        "log_prob": pytest.approx(np.log(0.6 * 0.8 * 0.75 * 0.7), abs=1e-5),
        "tokens": 5,
        "last_word": 1,
        "last_word_log_prob": pytest.approx(np.log(0.75 * 0.7), abs=1e-5),
        "last_word_tokens": 2,
    }
    assert second == {
        "log_prob": pytest.approx(np.log(0.4 * 0.7), abs=1e-5),
        "tokens": 3,
        "last_word": 0,
        "last_word_log_prob": pytest.approx(np.log(0.4 * 0.7), abs=1e-5),
        "last_word_tokens": 2,
    }


def test_scored_tokens_do_not_depend_on_batches_or_begin_token():
    passages = ["the cat sat", "the sat", "the cat\n"]
    plain = scores_of_passages(*passages[:2])
    for options in ({"batch_size": 3}, {"begin_of_text": 0}):
        for actual, expected in zip(
            scores_of_passages(*passages[:2], **options), plain, strict=True
        ):
            assert actual == pytest.approx(expected, abs=1e-5)
    assert scores_of_passages(passages[2])[0]["last_word"] == 1


def test_last_words_are_split():
    assert split_last_word("do n't care about signs") == ("do n't care about", "signs")
    assert split_last_word('"No insurance?"\n\n she\u00a0said \n') == (
        '"No insurance?"\n\n she',
        "said",
    )
    with pytest.raises(UserError, match="'alone' has fewer than two words"):
        split_last_word("alone")
