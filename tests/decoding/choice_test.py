"""The candidates of `tune` and `auto`, and the choice among what was measured."""

import dataclasses

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding import choice
from bpd_jax.decoding.choice import (
    Choice,
    candidate_methods,
    choose_method,
    tuned_choice,
)
from bpd_jax.decoding.compare import MethodResult
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import BATCHED, TREE, DecodeOptions
from bpd_jax.decoding.verification import pass_sizes
from bpd_jax.drafting.assets import Assets
from bpd_jax.drafting.searches.tree import Tree
from bpd_jax.models.quantized import rounded
from tests.decoding.random_models import (
    make_drafter,
    make_model,
    make_ngram,
    make_prompts,
)

OPTIONS = DecodeOptions(max_new_tokens=20, batch_size=2)
BPD, SEVERAL = parse_method("bpd"), parse_method("zero_gram:9")


@pytest.fixture(scope="module")
def decoder():
    return Decoder(make_model(3, num_layers=1), width=4)


@pytest.fixture(scope="module")
def prompts():
    return make_prompts([3, 17])


def result(name, *seconds):
    """The result of a method whose rounds took so long for the one prompt."""
    method = parse_method(name)
    return MethodResult(method, name, [], [], tuple((s,) for s in seconds))


@pytest.mark.parametrize(
    "results, chosen, text",
    [
        ([result("bpd", 0.96)], "greedy", "no method is faster; bpd is 1.04 times as"),
        ([result("oracle", 0.3), result("bpd", 0.5)], "bpd", "bpd, 2.00 times as fast"),
        # The median over rounds, each of which has its own plain decoding.
        ([result("bpd", 0.5, 4.0, 0.5), result("zero_gram:9", 0.9)], "bpd", "bpd, 2.0"),
    ],
)
def test_the_fastest_is_chosen_if_it_is_faster(results, chosen, text):
    rounds = max(len(r.text_seconds) for r in results)
    results = [
        dataclasses.replace(r, text_seconds=(*r.text_seconds, *[(0.9,)] * 2)[:rounds])
        for r in [result("greedy", *[1.0] * rounds), *results]
    ]
    choice = Choice.among(results)
    assert choice.method == parse_method(chosen)
    assert text in str(choice)


def test_auto_decodes_some_prompts_with_every_method(decoder, prompts, monkeypatch):
    seen = []

    def compare(decoder, methods, prompts, options, on_progress):
        seen.append((methods, len(prompts), options.max_new_tokens))
        names = [method.name for method in methods]
        return [result("greedy", 1.0), *(result(name, 0.5) for name in names)]

    monkeypatch.setattr(choice, "compare", compare)
    options = DecodeOptions(max_new_tokens=100, batch_size=3)
    chosen = choose_method(decoder, prompts * 3, options, methods=[SEVERAL, BPD])
    assert chosen.method == SEVERAL
    assert seen == [([SEVERAL, BPD], 4, 64)]
    with pytest.raises(UserError, match="needs prompts"):
        choose_method(decoder, [], options)


def test_auto_measures(decoder, prompts):
    assert choose_method(decoder, prompts, OPTIONS, methods=[BPD]).fastest == BPD


@pytest.mark.parametrize(
    "method, verification, sizes",
    [
        ("bpd", TREE, (4,)),
        ("zero_gram:9", TREE, (12, 23)),
        ("zero_gram:9", BATCHED, (9 * 4,)),
        ("prompt_lookup:4", TREE, (1, 5)),
        ("heads/tree:8+lookup:4", TREE, (8, 12)),
        ("heads/tree:16:min_prob=0.05+lookup:8", TREE, (8, 16, 24)),
    ],
)
def test_passes_are_compiled_for_a_few_sizes(decoder, method, verification, sizes):
    drafter = decoder.drafter(parse_method(method))
    assert pass_sizes(drafter, verification) == sizes


def test_small_models_must_hold_the_texts():
    small = make_model(0, 1, num_layers=1, max_length=40)
    decoder = Decoder(make_model(3, num_layers=1), width=4)
    decoder = Decoder(decoder.model, width=4, assets=Assets(draft_model=small))

    def kinds(length):
        methods = candidate_methods(decoder, make_prompts([3, length]), OPTIONS)
        return {method.kind for method in methods}

    assert kinds(21) == kinds(20) - {"draft_model/chains"} != kinds(20)


def test_tuned_choice_depends_on_device_and_batch_size():
    facts = {"device": "cpu", "choices": {"1": "zero_gram:9"}}
    assert tuned_choice("file", facts, "cpu", 1) == SEVERAL
    assert tuned_choice("file", facts, "cpu", 2) is None
    assert tuned_choice("file", facts, "gpu", 1) is None


@pytest.mark.parametrize(
    "backend, width, expected",
    [
        ("cpu", 8, "block+ngram:alpha=0.25/tree:8:price=1.4+lookup:4"),
        ("cpu", 9, "block:k=8+ngram:alpha=0.25/tree:8:price=1.4+lookup:4"),
        ("gpu", 9, "block+ngram:alpha=0.25/tree:32+lookup:8"),
    ],
)
def test_default_method_is_a_candidate(monkeypatch, backend, width, expected):
    model = make_model(0, num_layers=2)
    drafter = make_drafter(model, feature_layers=(0, 1))
    assets = Assets(ngram=make_ngram(), drafter=drafter)
    decoder = Decoder(model, width=width, assets=assets)
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    assert decoder.default_method == parse_method(expected)
    assert decoder.default_method in candidate_methods(decoder, [], OPTIONS)


def test_the_default_tree_depends_on_the_costs_of_products():
    model = make_model(0, num_layers=2)
    assets = Assets(drafter=make_drafter(model), ngram=make_ngram())
    stored = dataclasses.replace(model, params=rounded(model.params)[0])
    default = Decoder(stored, width=4, assets=assets).default_method
    assert default.search == Tree(4, price=1.6)
    assert Decoder(model, width=4).default_method == parse_method("bpd")
    heads = Decoder(stored, width=4).default_method
    assert heads == parse_method("heads/tree:4:price=1.6")


@pytest.mark.parametrize("block_size, width", [(1, 4), (2, 3), (4, 2), (4, 8)])
def test_every_candidate_can_be_made(block_size, width):
    """Also where a lattice has fewer paths than the larger sizes ask for."""
    decoder = Decoder(
        make_model(0, block_size, num_layers=1),
        width=width,
        assets=Assets(ngram=make_ngram()),
    )
    methods = candidate_methods(decoder, [], OPTIONS)
    for method in methods:
        decoder.drafter(method)
    kinds = {method.kind for method in methods}
    assert ("heads+ngram/tree" in kinds) == (block_size > 1)
    assert len(set(methods)) == len(methods)
