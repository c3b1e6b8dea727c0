"""Tests of passage scores under a bigram model with known probabilities."""

import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.evaluation.lambada import passage_scores, split_last_word

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


def scores(*passages, **options):
    model = Bigrams(jnp.log(jnp.maximum(BIGRAMS, 1e-30)))
    return passage_scores(model, encode, passages, **options)


def test_scores_of_passages_computed_by_hand():
    """Tokens and their probabilities after one another:

        th e(1) _ca(0.6) t(0.8) _s(0.75) at(0.7)
        th e(1) _s(0.4) at(0.7)

    Greedy decoding writes `_s at` after `the cat`, and `_ca` after `the`.
    """
    first, second = scores("the cat sat", "the sat")
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
    plain = scores(*passages[:2])
    for options in ({"batch_size": 3}, {"begin_of_text": 0}):
        for actual, expected in zip(
            scores(*passages[:2], **options), plain, strict=True
        ):
            assert actual == pytest.approx(expected, abs=1e-5)
    assert scores(passages[2])[0]["last_word"] == 1


def test_last_words_are_split():
    assert split_last_word("do n't care about signs") == ("do n't care about", "signs")
    assert split_last_word('"No insurance?"\n\n she\u00a0said \n') == (
        '"No insurance?"\n\n she',
        "said",
    )
    with pytest.raises(UserError, match="'alone' has fewer than two words"):
        split_last_word("alone")
