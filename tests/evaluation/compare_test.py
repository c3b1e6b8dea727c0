"""Methods on the same prompts: differences of their texts, and a report's blocks."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.compare import (
    Difference,
    MethodResult,
    compare,
    compile_methods,
    differences,
    divergence,
    fail_on_errors,
    fastest,
)
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation.block_views import most_improved_block

pytest.importorskip("pynini")
METHODS = ["bpd", "ngram:3", "oracle"]
OPTIONS = DecodeOptions(max_new_tokens=16, batch_size=3)


@pytest.fixture(scope="module")
def results(decoder, prompts):
    """Every kind of method on the prompts, by name."""
    compared = compare(decoder, list(map(parse_method, METHODS)), prompts, OPTIONS)
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
    methods = [parse_method("ngram:3"), parse_method("bpd")]
    _, ngram, bpd = compared = compare(decoder, methods, prompts, OPTIONS)
    assert ngram.differences == []
    [error] = bpd.errors
    assert (error.prompt_index, error.position) == (1, 2)
    with pytest.raises(UserError, match=r"NOT LOSSLESS: BPD .* prompt 2 at token 3"):
        fail_on_errors(compared, tmp_path)


def test_methods_alternate_in_rounds(decoder, prompts):
    turns = []
    results = compare(
        decoder,
        [parse_method("bpd")],
        prompts,
        OPTIONS,
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
    plain = MethodResult(parse_method("greedy"), "", [], [], ((2.0,), (3.0,), (20.0,)))
    bpd = MethodResult(parse_method("bpd"), "", [], [], ((1.0,), (2.0,), (5.0,)))
    assert bpd.speedup(plain) == 2.0
    assert fastest([plain, bpd]) == bpd
    untimed = MethodResult(parse_method("bpd"), "", [], [])
    assert untimed.speedup(plain) is None
    # Of some prompts: twice as fast on the first, half as fast on the others.
    plain = MethodResult(parse_method("greedy"), "", [], [], ((2.0, 1.0, 1.0),) * 2)
    bpd = MethodResult(parse_method("bpd"), "", [], [], ((1.0, 2.0, 2.0),) * 2)
    assert bpd.speedup_of(plain, slice(0, 1)) == 2.0
    assert bpd.speedup_of(plain, slice(1, 3)) == 0.5


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
        compare(plain, [parse_method("ngram:2")], prompts, OPTIONS)


@pytest.mark.parametrize("refined", [["ngram:3"], []])
def test_block_is_a_serial_call_of_bpd(decoder, results, refined):
    bpd = results["bpd"]
    view = most_improved_block(decoder, [bpd, *(results[name] for name in refined)])
    labels = ["BPD", *(["3-best 3-gram"] if refined else []), "Oracle"]
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


@dataclasses.dataclass(frozen=True)
class FlatModel:
    """A model whose two best tokens, 2 and 3, are `gap` apart everywhere."""

    gap: float
    dtype: str = "float32"

    @property
    def config(self):
        return types.SimpleNamespace(trunk=types.SimpleNamespace(dtype=self.dtype))

    def forward(self, tokens, positions, mask, cache=None):
        return np.zeros((*tokens.shape, 1)), None

    def next_token_logits(self, hidden):
        return np.array([0.0, -1.0, 5.0, 5.0 - self.gap])


@pytest.mark.parametrize(
    "gap, dtype, near",
    [
        (1e-6, "float32", True),
        (0.01, "float32", False),
        (0.01, "float16", True),
        (0.1, "float16", False),
        (0.1, "bfloat16", True),
        (0.5, "bfloat16", False),
    ],
)
def test_differences_and_near_ties_are_distinguished(make_generation, gap, dtype, near):
    """The limit of near ties depends on the precision of the model."""
    reference = [make_generation([0, 2, 1]), make_generation([0, 2, 1])]
    outputs = [make_generation([0, 2, 1]), make_generation([0, 3, 1])]
    [difference] = differences(FlatModel(gap, dtype), reference, outputs)
    assert (difference.prompt_index, difference.position) == (1, 1)
    assert difference.gap == pytest.approx(gap)
    assert difference.near_tie is near
    result = MethodResult(parse_method("bpd"), "BPD", outputs, [difference])
    assert result.errors == ([] if near else [difference])


@pytest.mark.parametrize("wanted, got, gap", [(2, 1, 6.0), (1, 2, 6.0), (3, 0, 5.0)])
def test_tie_of_other_tokens_is_not_a_near_tie(make_generation, wanted, got, gap):
    texts = [make_generation([2, wanted])], [make_generation([2, got])]
    assert differences(FlatModel(0.0), *texts) == [Difference(0, 1, gap, False)]


def test_text_that_stops_early_is_not_a_near_tie(make_generation):
    texts = [make_generation([2, 3])], [make_generation([2])]
    for reference, outputs in (texts, texts[::-1]):
        text_differences = differences(FlatModel(0.0), reference, outputs)
        assert text_differences == [Difference(0, 1, float("inf"), False)]
        assert divergence(text_differences, 1) == {"rate": 1, "first": 2, "gap": 0}


def test_divergence_summarises_differences():
    text_differences = [
        Difference(0, 11, 0.25, False),
        Difference(3, 4, 0.0, True),
        Difference(2, 30, 0.125, True),
    ]
    expected = {"rate": 0.75, "first": 5, "gap": 0.125}
    assert divergence(text_differences, 4) == expected
    assert divergence([], 4) is None
