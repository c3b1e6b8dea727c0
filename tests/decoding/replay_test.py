"""Replay reproduces decoding, call by call, without the model."""

import dataclasses

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.recording import padded_sizes, record_text
from bpd_jax.decoding.replay import record, replay_of
from bpd_jax.drafting.assets import Assets
from tests.decoding.random_models import (
    assert_same,
    make_drafter,
    make_model,
    make_ngram,
    make_prompts,
)

EXHAUSTIVE = pytest.mark.exhaustive
METHODS = [
    "bpd",
    pytest.param("zero_gram:5", marks=EXHAUSTIVE),
    pytest.param("ngram:1:search=greedy:alpha=0.5", marks=EXHAUSTIVE),
    pytest.param("ngram:4:adaptive=1", marks=EXHAUSTIVE),
    pytest.param("medusa:12", marks=EXHAUSTIVE),
    pytest.param("medusa_ngram:12", marks=EXHAUSTIVE),
    "neural:2",
    pytest.param("neural:2:mode=parallel", marks=EXHAUSTIVE),
    pytest.param("prompt_lookup:4", marks=EXHAUSTIVE),
    pytest.param("zero_gram:3:lookup=4", marks=EXHAUSTIVE),
    "oracle",
    pytest.param("block/greedy", marks=EXHAUSTIVE),
    "block:4+markov+ngram/tree:6+lookup:3",
]
OPTIONS = DecodeOptions(max_new_tokens=24, end_of_text=0, batch_size=2)


@pytest.fixture(scope="module")
def decoder():
    model = make_model(3)
    small = make_model(4, 1, num_layers=1)
    assets = Assets(
        ngram=make_ngram(),
        rescorer=small,
        draft_model=small,
        drafter=make_drafter(model, markov_rank=3, markov_reads_state=True),
    )
    texts = [bytes([97 + token]) for token in range(13)]
    return Decoder(model, width=5, assets=assets, token_bytes=lambda: texts)


@pytest.fixture(scope="module")
def greedy(decoder):
    return decoder.decode(GREEDY, make_prompts([3, 17, 8]), OPTIONS)


@pytest.fixture(scope="module")
def replay(decoder, greedy):
    return record(decoder, greedy, OPTIONS)


@pytest.mark.parametrize("name", METHODS)
def test_replay_takes_the_steps_of_the_loop(name, decoder, greedy, replay):
    method = parse_method(name)
    prompts = [text.input_ids for text in greedy]
    real = decoder.decode(method, prompts, OPTIONS, reference=greedy)
    replayed = replay.decode(method)
    assert_same(real, replayed, "output_ids", "accepted", "proposed", "nodes")
    for a, b in zip(real, replayed, strict=True):
        # Which draft would have won past the end of the text is not recorded.
        assert a.drafts[:-1].tolist() == b.drafts[:-1].tolist()
        assert a.ranks[:-1].tolist() == b.ranks[:-1].tolist()
        np.testing.assert_allclose(a.entropies, b.entropies, atol=1e-4)
        assert a.block_efficiency == b.block_efficiency


@pytest.mark.parametrize(
    "name",
    ["bpd", "ngram:4:adaptive=1", pytest.param("neural:2", marks=EXHAUSTIVE), "oracle"],
)
def test_drafts_at_every_position_hold_those_of_decoding(name, replay):
    """Advancing by the accepted tokens of each call gives the calls of decoding."""
    method = parse_method(name)
    all_positions = replay.decode(method, every_position=True)
    for decoded, all_calls in zip(replay.decode(method), all_positions, strict=True):
        assert all_calls.output_ids.tolist() == decoded.output_ids.tolist()
        assert all_calls.serial_calls == len(decoded.output_ids)
        begins = np.cumsum([0, *decoded.accepted[:-1]])
        assert all_calls.accepted[begins].tolist() == decoded.accepted.tolist()
        assert all_calls.proposed[begins].tolist() == decoded.proposed.tolist()
        assert all_calls.nodes[begins].tolist() == decoded.nodes.tolist()


def test_padding_does_not_change_a_replay(decoder, greedy, replay):
    """Texts are recorded one by one, and padded to larger sizes."""
    (slots, positions), width = padded_sizes(greedy), decoder.width
    texts = [
        record_text(decoder, text, width, slots=slots + 32, positions=positions)
        for text in greedy
    ]
    sizes = (slots + 64, positions + 32)
    larger = replay_of(decoder, texts, OPTIONS, sizes=sizes, padded=64)
    method = parse_method("ngram:4:adaptive=1")
    assert_same(replay.decode(method), larger.decode(method), "proposed", "accepted")


def test_accuracies_of_the_heads(decoder, greedy, replay):
    """Counted here from the first candidates of BPD's own calls at every position."""
    accuracies = np.array(replay.accuracies(ranks=5))
    hits = np.zeros(3)
    count = np.zeros(3)
    bpd = replay.decode(parse_method("bpd"), every_position=True)
    for text in bpd:
        for position, draft in enumerate(text.proposed):
            for head in range(3):
                if position + head + 1 < len(text.output_ids):
                    count[head] += 1
                    hits[head] += (
                        draft[head + 1] == text.output_ids[position + head + 1]
                    )
    np.testing.assert_allclose(accuracies[:, 0], hits / count)


def test_stop_texts_end_a_replayed_text(decoder, greedy):
    """The text stops where two of its tokens in a row have been read."""
    first = greedy[0]
    stop = "".join(chr(97 + token) for token in first.output_ids[3:5])
    options = dataclasses.replace(OPTIONS, stop=(stop,))
    prompts = [text.input_ids for text in greedy]
    texts = decoder.decode(GREEDY, prompts, options)
    assert len(texts[0].output_ids) <= 5 < len(first.output_ids)
    method = parse_method("bpd")
    real = decoder.decode(method, prompts, options)
    replayed = record(decoder, texts, options).decode(method)
    assert_same(real, replayed, "output_ids", "accepted")


def test_accuracies_need_text(decoder):
    """Of two new tokens, head 2 predicts the second, and head 3 none."""
    options = DecodeOptions(max_new_tokens=2)
    texts = decoder.decode(GREEDY, make_prompts([3, 5]), options)
    replay = record(decoder, texts, options)
    with pytest.raises(UserError, match=r"head 2 .* 2 tokens .* fewer than 3"):
        replay.accuracies(least=3)
    with pytest.raises(UserError, match="head 3 predicts only 0 tokens"):
        replay.accuracies()


def test_unsupported_replays_are_refused(decoder, greedy, replay):
    with pytest.raises(UserError, match="lookahead cannot be replayed"):
        replay.decode(parse_method("lookahead"))
    with pytest.raises(UserError, match="needs 6 candidates per head, but only 5 were"):
        replay.decode(parse_method("zero_gram:2:k=6"))
    with pytest.raises(UserError, match="only 5 candidates per head were recorded"):
        replay.decoder(width=6)
    sampled = dataclasses.replace(OPTIONS, temperature=1.0)
    with pytest.raises(UserError, match="decoded greedily"):
        record(decoder, greedy, sampled)
