"""Replay does what decoding does, call by call, without the model."""

import dataclasses

import numpy as np
import pytest

from bpd_jax.decoding.assets import Assets
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.methods import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.replay import record
from bpd_jax.errors import UserError

METHODS = [
    "bpd",
    "bpd:heads=3",
    "zero_gram:5",
    "zero_gram:2:k=3",
    "ngram_device:4",
    "ngram:4:search=greedy:alpha=0.5",
    "ngram:4:adaptive=1",
    "medusa:12",
    "medusa_ngram:12",
    "medusa_ngram:10:search=best",
    "oracle",
]
OPTIONS = DecodeOptions(max_new_tokens=24, end_of_text=0, batch_size=2)


@pytest.fixture(scope="module")
def decoder(make_model, make_ngram):
    return Decoder(*make_model(3), width=5, assets=Assets(ngram=make_ngram()))


@pytest.fixture(scope="module")
def greedy(decoder, make_prompts):
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
    for a, b in zip(real, replayed, strict=True):
        assert a.output_ids.tolist() == b.output_ids.tolist()
        assert a.accepted.tolist() == b.accepted.tolist()
        assert a.proposed.tolist() == b.proposed.tolist()
        # Which draft would have won past the end of the text, nobody recorded.
        assert a.drafts[:-1].tolist() == b.drafts[:-1].tolist()
        assert a.ranks[:-1].tolist() == b.ranks[:-1].tolist()
        assert a.nodes.tolist() == b.nodes.tolist()
        np.testing.assert_allclose(a.entropies, b.entropies, atol=1e-4)
        assert a.block_efficiency == b.block_efficiency


def test_accuracies_are_those_of_the_heads(decoder, greedy, replay):
    """Counted here from the first candidates of BPD's own calls at every position."""
    found = np.array(replay.accuracies(ranks=5))
    assert found.shape == (3, 5)
    assert ((found >= 0) & (found <= 1)).all()
    assert (found.sum(1) <= 1).all()
    hits = np.zeros(3)
    count = np.zeros(3)
    candidates = np.asarray(replay.recording.candidates)
    for row, text in enumerate(greedy):
        whole = np.concatenate([text.input_ids, text.output_ids])
        for place in range(len(text.input_ids) - 1, len(whole)):
            for head in range(3):
                if place + head + 2 < len(whole):
                    count[head] += 1
                    first = candidates[row, place, head, 0]
                    hits[head] += first == whole[place + head + 2]
    np.testing.assert_allclose(found[:, 0], hits / count)


def test_what_cannot_be_replayed_is_refused(decoder, greedy, replay):
    with pytest.raises(UserError, match="lookahead cannot be replayed"):
        replay.decode(parse_method("lookahead"))
    with pytest.raises(UserError, match="asks for 6 candidates per head, but 5 were"):
        replay.decode(parse_method("zero_gram:2:k=6"))
    with pytest.raises(UserError, match="5 candidates per head were recorded"):
        replay.decoder(width=6)
    with pytest.raises(UserError, match="needs a recording with hidden states"):
        replay.decode(parse_method("hydra"))
    sampled = dataclasses.replace(OPTIONS, temperature=1.0)
    with pytest.raises(UserError, match="decoded greedily"):
        record(decoder, greedy, sampled)
