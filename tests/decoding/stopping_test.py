"""Stop texts: the automaton against a search through the bytes, and in the loop."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decode_state import StopTable, cut_at_stop
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from tests.decoding.random_models import make_model, make_prompts

# Few different bytes, so that stop texts overlap, repeat and contain each other.
pieces = st.binary(min_size=0, max_size=3).map(lambda b: bytes(97 + x % 3 for x in b))
stop_texts = pieces.filter(len)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(stop_texts, min_size=1, max_size=4),
    st.lists(pieces, min_size=1, max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=10),
)
def test_automaton_equals_a_search(stops, vocabulary, text):
    text = [token % len(vocabulary) for token in text]
    table = np.asarray(StopTable.of(stops, vocabulary).next_state)
    state, read = 0, b""
    for token in text:
        state, read = table[state, token], read + vocabulary[token]
        assert (state == len(table) - 1) == any(stop in read for stop in stops)


@pytest.mark.parametrize(
    "text, stops, want",
    [
        ("one two", [], "one two"),
        ("one two", ["x"], "one two"),
        ("one\n\ntwo\n\n", ["\n\n"], "one"),
        ("xabc", ["abc", "b"], "xa"),  # `b` is complete first
        ("xabc", ["b", "ab"], "x"),  # both at once: the longer one
        ("stop", ["stop"], ""),
        # A last token may run on past the stop text that ended the row.
        ("abc", ["bcd", "c"], "ab"),
        ("abcde", ["bcd", "c"], "ab"),
    ],
)
def test_cut_at_stop(text, stops, want):
    assert cut_at_stop(text, stops) == want


# Tokens 0 … 12 of the random models as texts.
BYTES = [b"<end>", *(bytes([c]) for c in b"abcdefghijk"), b"ab"]


@pytest.mark.parametrize(
    "name",
    [
        "greedy",
        "zero_gram:5",
        pytest.param("medusa:8", marks=pytest.mark.exhaustive),
    ],
)
def test_rows_end_at_their_own_stop_texts(name):
    """Each row ends with the token that completes a stop text, whatever its drafts."""
    prompts = make_prompts([4, 9, 2, 6, 12], seed=4)
    decoder = Decoder(make_model(3), width=4, token_bytes=lambda: BYTES)
    # Sampled, because greedy texts of random models repeat themselves.
    options = DecodeOptions(max_new_tokens=24, batch_size=5, temperature=1.5)
    unstopped = decoder.decode(parse_method("greedy"), prompts, options)
    texts = [[BYTES[t] for t in g.output_ids] for g in unstopped]
    # Across three tokens, across two, and in the middle of three.
    stops = [b"".join(texts[row][n : n + 3]) for row, n in ((0, 5), (1, 12), (2, 17))]
    stops[1], stops[2] = stops[1][:2], stops[2][1:]
    # One that begins in the prompt does not end its row.
    stops.append(BYTES[prompts[3][-1]] + texts[3][0])
    assert not texts[3][0].startswith(stops[3])
    stopped = dataclasses.replace(options, stop=tuple(s.decode() for s in stops))
    outputs = decoder.decode(parse_method(name), prompts, stopped)
    ends = []
    for tokens, want, got in zip(texts, unstopped, outputs, strict=True):
        ends.append(
            next(
                n
                for n in range(1, 25)
                if n == 24 or any(s in b"".join(tokens[:n]) for s in stops)
            )
        )
        assert got.output_ids.tolist() == want.output_ids[: ends[-1]].tolist()
        assert got.accepted.sum() == ends[-1]
        # Tokens of the draft past the stop text are not counted.
        assert len(got.accepted) == got.serial_calls
    assert len(set(ends)) > 2


def test_stop_texts_need_a_tokenizer():
    decoder = Decoder(make_model(0), width=4)
    options = DecodeOptions(max_new_tokens=4, stop=("x",))
    with pytest.raises(UserError, match="stop texts need the model's tokenizer"):
        decoder.decode(parse_method("bpd"), [np.array([1])], options)
