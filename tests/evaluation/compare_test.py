"""Methods on the same prompts, and the blocks that a report shows of their drafts."""

import dataclasses

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation.block_views import most_improved_block
from bpd_jax.evaluation.compare import (
    MethodResult,
    compare,
    compile_methods,
    fail_on_errors,
    fastest,
)

pytest.importorskip("pynini")
METHODS = ["bpd", "zero_gram:3", "ngram:3", "oracle"]


@pytest.fixture(scope="module")
def results(decoder, prompts):
    """Every kind of method on the prompts, by name."""
    options = DecodeOptions(max_new_tokens=16, batch_size=3)
    compared = compare(decoder, list(map(parse_method, METHODS)), prompts, options)
    return {result.method.name: result for result in compared}


def test_wrong_method_is_detected_and_raises(
    decoder, prompts, results, monkeypatch, tmp_path
):
    def decode(method, *args, **kwargs):
        generations = list(results[method.name].generations)
        if method == parse_method("bpd"):
            output = generations[1].output_ids.copy()
            output[2] = (output[2] + 1) % 13
            generations[1] = dataclasses.replace(generations[1], output_ids=output)
        return generations

    monkeypatch.setattr(decoder, "decode", decode)
    methods = [parse_method("zero_gram:3"), parse_method("bpd")]
    _, zero_gram, bpd = compared = compare(
        decoder, methods, prompts, DecodeOptions(max_new_tokens=16)
    )
    assert zero_gram.differences == []
    [error] = bpd.errors
    assert (error.prompt_index, error.position) == (1, 2)
    with pytest.raises(UserError, match=r"NOT LOSSLESS: BPD .* prompt 2 at token 3"):
        fail_on_errors(compared, tmp_path)


def test_methods_alternate_in_rounds(decoder, prompts):
    options = DecodeOptions(max_new_tokens=8, end_of_text=0, batch_size=2)
    turns = []
    results = compare(
        decoder,
        [parse_method("bpd")],
        prompts,
        options,
        lambda label, tokens: turns.append((label, tokens)),
        rounds=2,
    )
    labels = dict.fromkeys(label for label, _ in turns)
    assert list(labels) == [result.label for result in results]
    half = len(turns) // 2
    assert turns[:half] == turns[half:]
    for result in results:
        assert len(result.seconds) == 2
        assert len(result.generations) == len(prompts)
        decoded = sum(tokens for label, tokens in turns[:half] if label == result.label)
        assert decoded == sum(len(g.output_ids) for g in result.generations)
        assert result.differences == []
    assert results[0].speedup(results[0]) == 1


def test_speedup_is_the_median_of_ratios_within_a_round():
    """The machine is ten times slower in the third round."""
    plain = MethodResult(parse_method("greedy"), "", [], [], (2.0, 3.0, 20.0))
    bpd = MethodResult(parse_method("bpd"), "", [], [], (1.0, 2.0, 5.0))
    assert bpd.speedup(plain) == 2.0
    assert fastest([plain, bpd]) == parse_method("bpd")
    untimed = MethodResult(parse_method("bpd"), "", [], [])
    assert untimed.speedup(plain) is None


def test_compile_methods_compiles_all_programs(decoder, prompts, caplog):
    options = DecodeOptions(max_new_tokens=7, end_of_text=0, batch_size=2)
    methods = [parse_method("bpd"), parse_method("zero_gram:3")]
    ready = []
    compile_methods(decoder, methods, prompts, options, ready.append)
    assert sorted(ready) == sorted(map(decoder.label, [GREEDY, *methods]))
    with jax.log_compiles():
        compare(decoder, methods, prompts, options)
    loops = [r for r in caplog.messages if "Compiling jit(decode_on_device)" in r]
    assert loops == []


def test_invalid_method_is_refused_before_decoding(decoder, prompts, monkeypatch):
    plain = Decoder(decoder.model, width=6)
    monkeypatch.setattr(plain, "decode", lambda *args, **kwargs: pytest.fail("decoded"))
    with pytest.raises(UserError, match="ngram:2 needs an n-gram model"):
        compare(
            plain, [parse_method("ngram:2")], prompts, DecodeOptions(max_new_tokens=4)
        )


@pytest.mark.parametrize(
    "refined, label",
    [
        ("ngram:3", "3-best 3-gram"),
        (None, None),
    ],
)
def test_block_is_a_serial_call_of_bpd(decoder, results, refined, label):
    bpd = results["bpd"]
    view = most_improved_block(decoder, [bpd, *([results[refined]] if refined else [])])
    labels = ["BPD", label, "Oracle"] if refined else ["BPD", "Oracle"]
    assert [path.label for path in view.paths] == labels
    assert view.tokens.shape == view.log_probs.shape == (4, 6)

    # The block begins at a serial call of BPD, and BPD's path is that call's draft.
    calls = {}
    for generation in bpd.generations:
        end, tokens = 0, generation.output_ids
        for draft, accepted in zip(generation.drafts, generation.accepted, strict=True):
            text = np.concatenate([generation.input_ids, tokens[:end]])
            calls[text.tobytes()] = draft, accepted, tokens[end : end + 4]
            end += accepted
    draft, accepted, greedy = calls[view.text.tobytes()]
    np.testing.assert_array_equal(view.greedy, greedy)
    np.testing.assert_array_equal(view.tokens[:, 0], draft)
    assert view.paths[0].accepted == accepted

    for path in view.paths:
        drafted = view.tokens[np.arange(4), path.candidates]
        agreed = 0
        while agreed < 4 and drafted[agreed] == view.greedy[agreed]:
            agreed += 1
        assert path.accepted == agreed >= 1
    assert view.paths[-1].accepted == max(path.accepted for path in view.paths)


def test_there_is_no_block_without_bpd_or_in_short_texts(decoder, results):
    assert most_improved_block(decoder, [results["greedy"]]) is None
    limited = dataclasses.replace(results["bpd"], method=parse_method("bpd:heads=2"))
    assert most_improved_block(decoder, [limited]) is None
    texts = [
        dataclasses.replace(g, output_ids=g.output_ids[:3], accepted=np.array([3]))
        for g in results["bpd"].generations
    ]  # shorter than a block of four
    short = dataclasses.replace(results["bpd"], generations=texts)
    assert most_improved_block(decoder, [short]) is None
