"""Prompts in batches and streams: the loop, its cache, and what it frees."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding import verification
from bpd_jax.decoding.decode_loop import (
    Weights,
    decode_on_device,
    prefill,
)
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import columns_to_read, stream
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions, StepOptions
from bpd_jax.drafting.assets import Assets
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.models.mesh import MeshConfig, make_mesh
from tests.decoding.random_models import (
    STEPS,
    assert_same,
    make_drafter,
    make_model,
    make_ngram,
    make_prompts,
    read_texts,
    sharded_model,
)


@pytest.mark.parametrize(
    "longest, padded, columns",
    [(20, 256, 64), (64, 256, 64), (65, 256, 128), (129, 256, 256), (20, 128, 64),
     (20, 96, 64), (65, 96, 96), (9, 64, 64), (9, 32, 32)],
)  # fmt: skip
def test_short_prompts_are_read_in_a_half_or_a_quarter(longest, padded, columns):
    prompts = [np.zeros(length) for length in (longest, 3, padded)]
    assert columns_to_read(prompts, [0, 1], padded) == columns
    assert columns_to_read(prompts, [1, 2], padded) == padded


def test_prompts_that_do_not_fit_are_refused():
    decoder = Decoder(make_model(0), width=4)
    options = DecodeOptions(max_new_tokens=100)
    bpd = parse_method("bpd")
    assert decoder.decode(bpd, [], options) == []
    fitting = np.ones(60, np.int32)
    assert len(decoder.decode(bpd, [fitting], options)[0].output_ids) == 100
    with pytest.raises(UserError, match="prompt 2 has 61 tokens, but the model holds"):
        decoder.decode(bpd, [fitting, np.ones(61, np.int32)], options)
    with pytest.raises(UserError, match="but the model holds 160 tokens including"):
        decoder.decode(bpd, [fitting], DecodeOptions(max_new_tokens=170))


@pytest.mark.parametrize("acceptance", ["speculative", "typical"])
def test_oracle_needs_exact_acceptance(acceptance):
    decoder = Decoder(make_model(0), width=4)
    options = DecodeOptions(temperature=1.0, acceptance=acceptance)
    with pytest.raises(UserError, match=f"text that {acceptance} acceptance would not"):
        decoder.decode(parse_method("oracle"), [np.array([1])], options)


def test_a_dropped_model_is_freed():
    """Compiled programs keep neither its parameters nor those of its drafters."""
    model = make_model.__wrapped__(2)  # not the one that other tests keep
    assets = Assets(ngram=make_ngram(), drafter=make_drafter(model))
    decoder = Decoder(model, width=4, assets=assets)
    method = parse_method("block+ngram/tree:4")
    decoder.decode(method, make_prompts([3]), DecodeOptions(max_new_tokens=3))
    kept = decoder.drafter(method).arrays
    arrays = list(map(weakref.ref, jax.tree.leaves((model, kept))))
    assert len(arrays) > 40
    del model, assets, decoder, kept
    gc.collect()
    assert [array for array in arrays if array() is not None] == []


PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


@pytest.mark.parametrize(
    "name, calls", [("medusa:8", 1), ("ngram_viterbi:3", 1), ("bpd", 3)]
)
def test_pieces_are_those_of_the_serial_calls(name, calls):
    if "viterbi" in name:
        pytest.importorskip("numba")
    decoder = Decoder(
        make_model(1, num_layers=1), width=3, assets=Assets(ngram=make_ngram())
    )
    options = DecodeOptions(max_new_tokens=22, end_of_text=0, temperature=0.7)
    method = parse_method(name)
    [decoded] = decoder.decode(method, [PROMPT], options)
    if calls == 1:
        streamed = decoder.stream(method, PROMPT, options)
    else:
        streamed = stream(decoder.task(method, options), PROMPT, calls=calls)
    pieces, generations = zip(*streamed, strict=True)
    assert [len(piece) for piece in pieces] == [
        sum(decoded.accepted[call : call + calls])
        for call in range(0, decoded.serial_calls, calls)
    ]
    assert np.concatenate(pieces).tolist() == decoded.output_ids.tolist()
    assert generations[:-1] == (None,) * (len(pieces) - 1)
    for field in ("output_ids", "serial_calls", "drafts", "accepted", "ranks", "nodes"):
        got, want = getattr(generations[-1], field), getattr(decoded, field)
        np.testing.assert_array_equal(got, want, field)


@pytest.mark.exhaustive
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


OPTIONS = StepOptions(end_of_text=0)
DRAFTER = PathDrafter(Paths(HeadsSource(4, 4)), ExactBest(3))


WEIGHTS = Weights(DRAFTER.arrays)


def start(model):
    rng = np.random.default_rng(7)
    lengths = np.array([6, 2, 8, 1])
    prompts = rng.integers(1, 13, (4, 8))
    arrays = prompts, lengths, lengths + np.array([12, 5, 0, 9])
    return prefill(
        model,
        WEIGHTS,
        DRAFTER,
        *(jnp.asarray(array, jnp.int32) for array in arrays),
        (0, jnp.arange(4)),
        options=OPTIONS,
        max_calls=12,
    )


def test_cache_always_holds_the_keys_of_the_text():
    """The cache after block decoding equals that of one pass over the text."""
    model = make_model(1)
    final = decode_on_device(model, WEIGHTS, DRAFTER, start(model), OPTIONS)
    # A row that is finished from the beginning does not change.
    assert (final.calls[2], final.lengths[2]) == (0, 8)
    values = np.asarray(final.cache.values)
    for row, length in enumerate(final.lengths.tolist()):
        tokens = np.asarray(final.tokens)[row : row + 1, :length]
        _, _, new, _ = read_texts(model, jnp.asarray(tokens))
        np.testing.assert_allclose(
            values[:, row, :, :length],
            new.values[:, 0].swapaxes(1, 2),
            atol=1e-4,
            err_msg=str(row),
        )


def test_loop_donates_its_state_and_never_leaves_the_device():
    model = make_model(0)
    state = start(model)
    compiled = decode_on_device.lower(model, WEIGHTS, DRAFTER, state, OPTIONS).compile()
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
    assert "callback" not in compiled.as_text()
    with jax.transfer_guard("disallow"):
        final = decode_on_device(model, WEIGHTS, DRAFTER, state, OPTIONS)
        jax.block_until_ready(final)
    assert final.done.all()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("heads/tree:24:min_prob=0.1+lookup:4", 12),
        pytest.param("heads/best:9", 16, marks=pytest.mark.exhaustive),
        pytest.param("lookup:5", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_passes_over_fewer_nodes_change_nothing(monkeypatch, name, size):
    """Passes of several sizes against passes over all nodes."""
    decoder = Decoder(make_model(3), width=3)
    options = DecodeOptions(max_new_tokens=24)
    prompts = make_prompts([4, 11, 7])
    method = parse_method(name)
    fewer = decoder.decode(method, prompts, options)
    sizes = []

    def one_size(drafter, tree):
        sizes.append(tree.size)
        return (tree.size,)

    # The loop is traced anew, with passes of one size, and is forgotten afterwards.
    monkeypatch.setattr(verification, "tree_sizes", one_size)
    decode_on_device.clear_cache()
    all_nodes = decoder.decode(method, prompts, options)
    decode_on_device.clear_cache()
    assert sizes
    nodes = np.concatenate([text.nodes for text in fewer])
    assert nodes.min() <= size < nodes.max()
    assert_same(fewer, all_nodes, *STEPS)
