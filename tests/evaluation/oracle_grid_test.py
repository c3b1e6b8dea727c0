"""Tests of the oracle's grid, by hand and against the oracle method."""

import numpy as np
import pytest

from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.replay import record
from bpd_jax.evaluation.oracle_grid import oracle_calls

X = 99


def test_calls_of_a_text_of_four_tokens():
    """The text is 1 2 3 4; calls yield, at each position:

    position  head 2 (2 … 4)  head 3 (3, 4)  k=1 h=2  k=1 h=3  k=2 h=2  k=2 h=3
    0         X 2             3 X            1        1        2        3
    1         3 X             X 4            2        2        2        3
    2         X X             X X            1        1        1        1
    3         past the end                   1        1        1        1
    """
    candidates = np.array(
        [
            [[X, 2], [3, X]],
            [[3, X], [X, 4]],
            [[X, X], [X, X]],
            [[4, 1], [1, 4]],
        ]
    )
    # k = 1: at 0, 1 (two tokens), 3. k = 2, h = 2: at 0, 2, 3. k = 2, h = 3: at 0, 3.
    assert oracle_calls(candidates, np.array([1, 2, 3, 4])).tolist() == [[3, 3], [3, 2]]


def test_calls_yield_no_tokens_past_the_end():
    """The candidates contain the text 7 7 7: two calls with one head, else one."""
    assert oracle_calls(np.full((3, 4, 1), 7), np.full(3, 7)).tolist() == [
        [2],
        [1],
        [1],
        [1],
    ]


def test_empty_text_takes_no_calls():
    no_candidates = np.zeros((0, 2, 3), int)
    assert oracle_calls(no_candidates, np.zeros(0, int)).tolist() == [[0] * 3] * 2


@pytest.fixture(scope="module")
def recorded(decoder, prompts):
    options = DecodeOptions(max_new_tokens=40, end_of_text=0, batch_size=3)
    texts = decoder.decode(GREEDY, prompts, options)
    return record(decoder, texts, options, width=6)


@pytest.mark.parametrize("heads, width", [(2, 1), (3, 2), (4, 3)])
def test_every_cell_equals_the_oracle_method(recorded, heads, width):
    replayed = recorded.decode(parse_method(f"oracle:k={width}:heads={heads}"))
    for text, generation in zip(recorded.texts, replayed, strict=True):
        grid = oracle_calls(text.candidates, text.output_ids)
        assert grid[heads - 2, width - 1] == generation.serial_calls


def test_one_candidate_equals_bpd(recorded):
    replayed = recorded.decode(parse_method("bpd"))
    calls = [oracle_calls(t.candidates, t.output_ids)[-1, 0] for t in recorded.texts]
    assert calls == [generation.serial_calls for generation in replayed]
    assert sum(calls) < sum(len(text.output_ids) for text in recorded.texts)
