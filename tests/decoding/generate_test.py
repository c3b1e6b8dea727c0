"""Texts of the loop: exact acceptance on scripts, losslessness on real models."""

import gc
import weakref

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding import decode_loop
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.generate import Task, columns_to_read, generate
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.assets import Assets
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.sources.heads import HeadsSource
from tests.decoding.random_models import (
    ScriptedModel,
    make_drafter,
    make_model,
    make_ngram,
    make_prompts,
)


def test_acceptance_on_a_script_is_exact():
    """Heads 2, 3, 4 are right at positions that 1, 2 and 3 divide."""
    script = tuple(int(t) for t in np.random.default_rng(0).integers(0, 50, 60))
    model = ScriptedModel(script, right=(1, 2, 3))
    drafter = PathDrafter(Paths(HeadsSource(4, 1)), ExactBest(1))
    options = DecodeOptions(max_new_tokens=24)
    [generation] = generate(Task(model, drafter, options), [np.array([9, 9, 9])])

    # The last accepted token of a 3-token prompt stands at position 2.
    position, accepted, drafts = 2, [], []
    while sum(accepted) < 24:
        right = [True] + [position % d == 0 for d in (1, 2, 3)]
        count = right.index(False) if False in right else 4
        drafts.append([(script[position + i] + (not right[i])) % 50 for i in range(4)])
        accepted.append(min(count, 24 - sum(accepted)))
        position += count
    assert generation.output_ids.tolist() == list(script[2:26])
    assert generation.accepted.tolist() == accepted
    # The limit cut the last draft: tokens past it are not recorded.
    drafts[-1][accepted[-1] :] = [-1] * (4 - accepted[-1])
    assert generation.drafts.tolist() == drafts
    assert generation.serial_calls == len(accepted)
    assert generation.block_efficiency == 24 / len(accepted)


@pytest.mark.parametrize(
    "longest, padded, columns",
    [(20, 256, 64), (64, 256, 64), (65, 256, 128), (129, 256, 256), (20, 128, 64),
     (20, 96, 64), (65, 96, 96), (9, 64, 64), (9, 32, 32)],
)  # fmt: skip
def test_short_prompts_are_read_in_a_half_or_a_quarter(longest, padded, columns):
    prompts = [np.zeros(length) for length in (longest, 3, padded)]
    assert columns_to_read(prompts, [0, 1], padded) == columns
    assert columns_to_read(prompts, [1, 2], padded) == padded


@pytest.mark.parametrize("batch_size", [1, 2])
def test_texts_do_not_depend_on_the_longest_prompt(batch_size, monkeypatch):
    decoder = Decoder(make_model(max_length=256), width=4)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 13, length) for length in (9, 30, 50, 100)]
    options = DecodeOptions(max_new_tokens=12, batch_size=batch_size)
    read = []
    run = decode_loop.run_prompts

    def counted(model, layers, prompts, lengths, columns):
        read.append(columns)
        return run(model, layers, prompts, lengths, columns)

    monkeypatch.setattr(decode_loop, "run_prompts", counted)
    texts = decoder.decode(parse_method("bpd"), prompts, options)
    # The first calls compile the programs.
    batches = len(prompts) // batch_size
    assert read[-batches:] == ([64, 64, 64, 128] if batch_size == 1 else [64, 128])
    for prompt, text in zip(prompts, texts, strict=True):
        [alone] = decoder.decode(GREEDY, [prompt], options)
        assert text.output_ids.tolist() == alone.output_ids.tolist()


def test_script_ends_at_its_first_end_of_text():
    script = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    model = ScriptedModel(script, right=(1, 1, 1))
    drafter = PathDrafter(Paths(HeadsSource(4, 1)), ExactBest(1))
    prompts = [np.array([0]), np.array([0] * 5), np.array([0] * 9)]
    options = DecodeOptions(max_new_tokens=7, end_of_text=7, batch_size=3)
    outputs = generate(Task(model, drafter, options), prompts)
    # Row 1 stops in the middle of its second block, row 2 in its first.
    assert outputs[0].output_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert outputs[0].accepted.tolist() == [4, 3]
    assert outputs[1].output_ids.tolist() == [5, 6, 7]
    assert outputs[1].accepted.tolist() == [3]
    # Row 3 has none and stops at its limit, beside finished rows.
    assert outputs[2].output_ids.tolist() == [9, 10, 11, 12, 12, 12, 12]
    assert outputs[2].accepted.sum() == 7


def test_prompts_that_do_not_fit_are_refused():
    decoder = Decoder(make_model(0), width=4)
    options = DecodeOptions(max_new_tokens=100)
    bpd = parse_method("bpd")
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


def test_no_prompts_give_no_texts():
    decoder = Decoder(make_model(0), width=4)
    assert decoder.decode(parse_method("bpd"), [], DecodeOptions()) == []


def test_a_dropped_model_is_freed():
    """Compiled programs keep neither its parameters nor those of its drafters."""
    model = make_model.__wrapped__(2)  # not the one that other tests keep
    assets = Assets(ngram=make_ngram(), drafter=make_drafter(model))
    decoder = Decoder(model, width=4, assets=assets)
    names = "heads+ngram/best:2:engine=viterbi", "block+ngram/tree:4"
    methods = list(map(parse_method, names))
    for method in methods:
        decoder.decode(method, make_prompts([3]), DecodeOptions(max_new_tokens=3))
    kept = [decoder.drafter(method).arrays for method in methods]
    arrays = list(map(weakref.ref, jax.tree.leaves((model, kept))))
    assert len(arrays) > 40
    del model, assets, decoder, kept, methods, method
    gc.collect()
    assert [array for array in arrays if array() is not None] == []
