"""Streaming: the pieces are those of the serial calls, and together the whole text."""

import jax
import numpy as np
import pytest

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import stream
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.assets import Assets
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from tests.decoding.random_models import make_model, make_ngram, sharded_model

PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("greedy", marks=pytest.mark.exhaustive),
        "medusa:8",
        "ngram_viterbi:3",
        pytest.param("oracle", marks=pytest.mark.exhaustive),
    ],
)
def test_pieces_are_those_of_the_serial_calls(name):
    if "viterbi" in name:
        pytest.importorskip("numba")
    decoder = Decoder(
        make_model(1, num_layers=1), width=3, assets=Assets(ngram=make_ngram())
    )
    options = DecodeOptions(max_new_tokens=22, end_of_text=0, temperature=0.7)
    method = parse_method(name)
    [decoded] = decoder.decode(method, [PROMPT], options)
    pieces, generations = zip(*decoder.stream(method, PROMPT, options), strict=True)
    assert [len(piece) for piece in pieces] == decoded.accepted.tolist()
    assert np.concatenate(pieces).tolist() == decoded.output_ids.tolist()
    assert generations[:-1] == (None,) * (len(pieces) - 1)
    for field in ("output_ids", "serial_calls", "drafts", "accepted", "ranks", "nodes"):
        got, want = getattr(generations[-1], field), getattr(decoded, field)
        np.testing.assert_array_equal(got, want, field)


def test_several_calls_make_one_piece():
    decoder = Decoder(make_model(1, num_layers=1), width=3)
    method, options = parse_method("bpd"), DecodeOptions(max_new_tokens=20)
    [decoded] = decoder.decode(method, [PROMPT], options)
    pieces = [
        piece.tolist()
        for piece, _ in stream(decoder.task(method, options), PROMPT, calls=3)
    ]
    sizes = [
        sum(decoded.accepted[n : n + 3]) for n in range(0, decoded.serial_calls, 3)
    ]
    assert [len(piece) for piece in pieces] == sizes
    assert [token for piece in pieces for token in piece] == decoded.output_ids.tolist()


def test_a_table_of_stop_texts_is_made_once():
    tokens = [bytes([65 + token]) for token in range(13)]
    decoder = Decoder(make_model(1, num_layers=1), width=3, token_bytes=lambda: tokens)
    options = DecodeOptions(stop=["AB"])
    first, second = (decoder.task(parse_method(n), options) for n in ("bpd", "greedy"))
    assert first.stops is second.stops is not None
    other_options = DecodeOptions(stop=("BA",))
    assert decoder.task(parse_method("bpd"), other_options).stops is not first.stops


def test_one_prompt_streams_from_eight_devices():
    method, options = parse_method("bpd"), DecodeOptions(max_new_tokens=12)
    texts = []
    for mesh in (None, make_mesh(MeshConfig(data=8))):
        model = make_model(1, num_layers=1)
        decoder = Decoder(sharded_model(model, mesh) if mesh else model, width=3)
        pieces = [piece for piece, _ in decoder.stream(method, PROMPT, options)]
        texts.append(np.concatenate(pieces).tolist())
    assert jax.device_count() == 8
    assert texts[0] == texts[1]
