import dataclasses

import numpy as np
import pytest

from bpd_jax.decoding.methods import Decoder, Method, parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError
from bpd_jax.evaluate import _fail_on_errors
from bpd_jax.evaluation.compare import compare

pytest.importorskip("pynini")
METHODS = ["bpd", "zero_gram:3", "ngram:3", "oracle"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_methods_decode_the_same_tokens(decoder, prompts, temperature):
    options = DecodeOptions(12, temperature=temperature, end_of_text=0, batch_size=2)
    seen = []
    results = compare(
        decoder,
        [parse_method(name) for name in [*METHODS, "bpd"]],
        prompts,
        options,
        lambda label, tokens: seen.append((label, tokens)),
    )
    assert [r.method.name for r in results] == ["autoregressive", *METHODS]
    for result in results:
        assert result.differences == []
        for wanted, got in zip(
            results[0].generations, result.generations, strict=True
        ):
            np.testing.assert_array_equal(wanted.output_ids, got.output_ids)
            assert got.accepted.sum() == len(got.output_ids)
        told = sum(tokens for label, tokens in seen if label == result.label)
        assert told == sum(len(g.output_ids) for g in result.generations)


def test_a_wrong_method_is_found_and_fails_loudly(
    decoder, prompts, monkeypatch, tmp_path
):
    original = Decoder.decode

    def corrupted(self, method, *args, **kwargs):
        generations = original(self, method, *args, **kwargs)
        if method == Method("bpd"):
            output = generations[1].output_ids.copy()
            output[2] = (output[2] + 1) % 13
            generations[1] = dataclasses.replace(generations[1], output_ids=output)
        return generations

    monkeypatch.setattr(Decoder, "decode", corrupted)
    methods = [Method("zero_gram", 3), Method("bpd")]
    results = compare(decoder, methods, prompts, DecodeOptions(8, batch_size=3))
    assert results[1].differences == []
    [error] = results[2].errors
    assert (error.prompt_index, error.position) == (1, 2)
    with pytest.raises(UserError, match="NOT LOSSLESS: BPD .* prompt 2 at token 3"):
        _fail_on_errors(results, tmp_path)


def test_an_unusable_method_is_told_before_any_work(decoder, prompts, monkeypatch):
    plain = Decoder(decoder.model, decoder.params, width=6)
    monkeypatch.setattr(plain, "decode", lambda *args, **kwargs: pytest.fail("decoded"))
    with pytest.raises(UserError, match="ngram:2 needs an n-gram model"):
        compare(plain, [Method("ngram", 2)], prompts, DecodeOptions(4))
