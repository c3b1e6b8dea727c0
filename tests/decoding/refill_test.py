"""Rows refilled as they finish: every text as if its prompt were decoded alone."""

import dataclasses

import numpy as np
import pytest

from bpd_jax.base import compiled
from bpd_jax.base.errors import UserError
from bpd_jax.decoding import refill
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.refill import decode_refilled, rounds_of
from tests.decoding.random_models import make_model, make_prompts

OPTIONS = DecodeOptions(max_new_tokens=9, end_of_text=0, batch_size=3)
LENGTHS = [5, 2, 9, 2, 7, 14, 3, 13, 4]
PROMPTS = make_prompts(LENGTHS)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Prompts are padded to 8 and 16: rows must grow once."""
    monkeypatch.setattr(refill, "_SHORTEST", 8)
    monkeypatch.setattr(compiled, "_STEP", 8)


@pytest.mark.parametrize(
    "method, temperature, batch_size, round_size",
    [
        pytest.param("greedy", 0, 3, 100, marks=pytest.mark.exhaustive),
        ("greedy", 1.5, 2, 5),
        # Groups of two rows; remembers bigrams of each row's text.
        ("lookahead", 0, 32, 100),
        pytest.param("bpd", 0, 3, 100, marks=pytest.mark.exhaustive),
    ],
)
def test_texts_equal_those_of_decode(method, temperature, batch_size, round_size):
    options = dataclasses.replace(OPTIONS, temperature=temperature)
    decoder = Decoder(make_model(), width=4)
    plain = decoder.decode(GREEDY, PROMPTS, options)
    options = dataclasses.replace(options, batch_size=batch_size)
    task = decoder.task(parse_method(method), options)
    order = np.random.default_rng(1).permutation(len(PROMPTS)).tolist()
    texts = list(decode_refilled(task, PROMPTS, order, round_size=round_size))
    assert sorted(text.prompt for text in texts) == list(range(len(PROMPTS)))
    for index, text, _ in texts:
        assert text.tolist() == [*plain[index].input_ids, *plain[index].output_ids]


def test_rows_are_refilled_before_the_longest_text_ends(monkeypatch):
    """With texts of 1 and of 9 tokens, few rows of a batch of two are idle."""
    decoder = Decoder(make_model(), width=4)
    task = decoder.task(GREEDY, dataclasses.replace(OPTIONS, batch_size=2))
    plain = decoder.decode(GREEDY, PROMPTS, OPTIONS)
    tokens = sum(len(text.output_ids) for text in plain)
    calls = []
    run = type(task).run

    def counted(self, state, max_calls=None, done_rows=None):
        calls_before = np.asarray(state.calls)
        # The calls of a row are counted from when it was filled.
        state = run(self, state, max_calls, done_rows)
        calls.append(int((np.asarray(state.calls) - calls_before).max()))
        return state

    monkeypatch.setattr(type(task), "run", counted)
    texts = list(decode_refilled(task, PROMPTS, range(len(PROMPTS))))
    assert len(texts) == len(PROMPTS)
    # Both rows are in use, except during the last text of the round.
    assert sum(calls) <= tokens / 2 + OPTIONS.max_new_tokens


def test_rounds_hold_every_prompt_once_sorted_by_padding():
    rounds = list(rounds_of(PROMPTS, range(9), size=5))
    assert [len(chosen) for chosen in rounds] == [5, 4]
    assert sorted(index for chosen in rounds for index in chosen) == list(range(9))
    for chosen in rounds:
        sizes = [refill.refill_length(LENGTHS[index]) for index in chosen]
        assert sizes == sorted(sizes)


def test_a_prompt_without_room_is_refused():
    task = Decoder(make_model(), width=4).task(GREEDY, OPTIONS)
    with pytest.raises(UserError, match="empty"):
        list(decode_refilled(task, [np.zeros(0, np.int32)], [0]))
