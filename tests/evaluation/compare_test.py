import dataclasses

import numpy as np
import pytest

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.methods import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError
from bpd_jax.evaluation.compare import compare, fail_on_errors

pytest.importorskip("pynini")
METHODS = ["bpd", "zero_gram:3", "ngram:3", "oracle"]


def test_all_methods_decode_the_same_tokens(results):
    reference = results["greedy"].generations
    assert list(results) == ["greedy", *METHODS]
    for result in results.values():
        assert result.differences == []
        for wanted, got in zip(reference, result.generations, strict=True):
            np.testing.assert_array_equal(wanted.output_ids, got.output_ids)
            assert got.accepted.sum() == len(got.output_ids)


def test_all_methods_sample_the_same_tokens(decoder, prompts):
    options = DecodeOptions(
        max_new_tokens=12, temperature=0.8, end_of_text=0, batch_size=2
    )
    methods = [parse_method(name) for name in [*METHODS, "bpd"]]
    seen = []

    def on_progress(label, tokens):
        seen.append((label, tokens))

    sampled = compare(decoder, methods, prompts, options, on_progress)
    assert [r.method.name for r in sampled] == ["greedy", *METHODS]
    for result in sampled:
        assert result.differences == []
        told = sum(tokens for label, tokens in seen if label == result.label)
        assert told == sum(len(g.output_ids) for g in result.generations)


def test_a_wrong_method_is_found_and_fails_loudly(
    decoder, prompts, results, monkeypatch, tmp_path
):
    def decode(method, *args, **kwargs):
        generations = list(results[method.name].generations)
        if method.kind == "bpd":
            output = generations[1].output_ids.copy()
            output[2] = (output[2] + 1) % 13
            generations[1] = dataclasses.replace(generations[1], output_ids=output)
        return generations

    monkeypatch.setattr(decoder, "decode", decode)
    methods = [parse_method("zero_gram:3"), parse_method("bpd")]
    _, zero_gram, bpd = found = compare(
        decoder, methods, prompts, DecodeOptions(max_new_tokens=16)
    )
    assert zero_gram.differences == []
    [error] = bpd.errors
    assert (error.prompt_index, error.position) == (1, 2)
    with pytest.raises(UserError, match=r"NOT LOSSLESS: BPD .* prompt 2 at token 3"):
        fail_on_errors(found, tmp_path)


def test_an_unusable_method_is_told_before_any_work(decoder, prompts, monkeypatch):
    plain = Decoder(decoder.model, decoder.params, width=6)
    monkeypatch.setattr(plain, "decode", lambda *args, **kwargs: pytest.fail("decoded"))
    with pytest.raises(UserError, match="ngram:2 needs an n-gram model"):
        compare(
            plain, [parse_method("ngram:2")], prompts, DecodeOptions(max_new_tokens=4)
        )
