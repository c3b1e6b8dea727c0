"""Predicted speedups, from costs that are set here, not measured."""

import dataclasses
import itertools

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding import speedup
from bpd_jax.decoding.call_costs import PassCosts, measure_drafting, measure_passes
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import BATCHED, TREE, DecodeOptions
from bpd_jax.decoding.replay import record
from bpd_jax.decoding.speedup import (
    Choice,
    Prediction,
    candidate_methods,
    choose_method,
    predict,
    tuned_choice,
)
from bpd_jax.decoding.verification import pass_sizes
from bpd_jax.drafting.assets import Assets
from bpd_jax.drafting.searches.tree import Tree
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.quantized import rounded
from tests.decoding.random_models import (
    make_drafter,
    make_model,
    make_ngram,
    make_prompts,
    sharded_model,
)

OPTIONS = DecodeOptions(max_new_tokens=20, batch_size=2)
BPD, SEVERAL = parse_method("bpd"), parse_method("zero_gram:9")


@pytest.fixture(scope="module")
def decoder():
    return Decoder(make_model(3, num_layers=1), width=4)


@pytest.fixture(scope="module")
def prompts():
    return make_prompts([3, 17])


@pytest.fixture(scope="module")
def replay(decoder, prompts):
    return record(decoder, decoder.decode(GREEDY, prompts, OPTIONS), OPTIONS)


@pytest.fixture
def costs(monkeypatch):
    """Sets the cost of a pass over M tokens, and of drafting by a method."""

    def give(passes, drafting=lambda method: 0.0):
        requests = []

        def measure_passes(decoder, batch_size, text_length, sizes):
            requests.append((batch_size, text_length, list(sizes)))
            return PassCosts({size: passes(size) for size in sizes})

        monkeypatch.setattr(speedup, "measure_passes", measure_passes)
        monkeypatch.setattr(
            speedup, "measure_drafting", lambda decoder, method, *rest: drafting(method)
        )
        return requests

    return give


def predicted(decoder, replay, methods, batch_size):
    """Predictions by method."""
    predictions = predict(decoder, replay, methods, [batch_size])[batch_size]
    return {prediction.method: prediction for prediction in predictions}


def test_costs_are_interpolated_and_extrapolated_linearly():
    """Measured at 1, 2 and 4, with slope 1/2, and at 8, with slope 1."""
    costs = PassCosts({1: 1.0, 2: 1.5, 4: 2.5, 8: 6.5})
    found = [costs.at(nodes) for nodes in (1, 2, 4, 5, 8, 12)]
    assert found == pytest.approx([1.0, 1.5, 2.5, 3.5, 6.5, 10.5])
    assert PassCosts({4: 2.5}).at(9) == 2.5


def test_speedup_follows_the_formula(decoder, replay, costs):
    """A pass takes 10 ms and 0.1 ms per token; drafting by several takes 5 ms."""
    requests = costs(
        lambda size: 0.010 + 0.0001 * size,
        lambda method: 0.005 if method == SEVERAL else 0.0,
    )
    predictions = predicted(decoder, replay, [BPD, SEVERAL], 2)
    # Texts of 3 + 20 and 17 + 20 tokens: the median is 30.
    assert [(batch, length) for batch, length, _ in requests] == [(2, 30)]
    assert predictions[BPD].nodes == 4
    assert 4 < predictions[SEVERAL].nodes <= requests[0][2][-1]
    for method, drafting in ((GREEDY, 0), (BPD, 0), (SEVERAL, 0.005)):
        texts = decoder.decode(method, [t.input_ids for t in replay.texts], OPTIONS)
        tokens = sum(len(text.output_ids) for text in texts)
        efficiency = tokens / sum(text.serial_calls for text in texts)
        prediction = predictions[method]
        assert prediction.block_efficiency == pytest.approx(efficiency)
        call = 0.010 + 0.0001 * prediction.nodes + drafting
        # Both rows of the one batch wait for the slower.
        most_calls = max(text.serial_calls for text in texts)
        assert prediction.speedup == pytest.approx(20 / most_calls * 0.0101 / call)
    assert predictions[GREEDY].speedup == 1.0


def test_calls_are_charged_with_the_pass_of_their_drafts(decoder, replay, costs):
    """Rows without a match of prompt lookup are verified with those that have one."""
    lookup = parse_method("prompt_lookup:4")
    costs(lambda size: 0.010 if size == 1 else 0.020)
    texts = replay.decode(lookup)
    nodes = [text.nodes.tolist() for text in texts]
    every_call = [*itertools.chain(*nodes)]
    assert set(every_call) == {1, 5}
    for rows in (1, 2):
        prediction = predicted(decoder, replay, [lookup], rows)[lookup]
        if rows == 1:
            calls = every_call
        else:
            calls = [max(pair) for pair in itertools.zip_longest(*nodes, fillvalue=0)]
        seconds = [0.020 if size == 5 else 0.010 for size in calls]
        plain = 0.010 * 20 * (2 if rows == 1 else 1)
        assert prediction.speedup == pytest.approx(plain / sum(seconds))
        assert prediction.nodes == pytest.approx(np.mean(calls))
        assert prediction.pass_seconds == pytest.approx(np.mean(seconds))


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
def test_passes_are_compiled_for_the_sizes_that_are_charged(
    decoder, method, verification, sizes
):
    drafter = decoder.drafter(parse_method(method))
    assert pass_sizes(drafter, verification) == sizes


def test_slow_methods_are_not_timed_and_come_last(decoder, replay, costs):
    costs(lambda size: 0.001 * size, lambda method: pytest.fail("timed"))
    lookup = parse_method("prompt_lookup:4")
    predictions = predict(decoder, replay, [SEVERAL, lookup], [1])[1]
    assert [p.method for p in predictions] == [GREEDY, lookup, SEVERAL]
    assert [p.draft_seconds for p in predictions] == [0.0, None, None]
    plain, *others = (p.speedup for p in predictions)
    assert plain == 1.0 > max(others)
    # The oracle is no bound for drafts that are not from the heads.
    assert [p.replayed for p in predictions] == [True, True, False]


@pytest.mark.parametrize("block_size", [1, 2])
def test_oracle_of_the_heads_does_not_bound_a_block_drafter(block_size, prompts, costs):
    """Not even if the model has heads, and the drafter may predict more tokens."""
    costs(lambda size: 0.001 * size)
    model = make_model(0, block_size, num_layers=1)
    decoder = Decoder(model, width=4, assets=Assets(drafter=make_drafter(model)))
    replay = record(decoder, decoder.decode(GREEDY, prompts, OPTIONS), OPTIONS)
    block = parse_method("block/tree:8")
    assert predicted(decoder, replay, [block], 1)[block].replayed


def test_one_replay_serves_all_batch_sizes(decoder, costs, monkeypatch):
    """Three texts: batches of one are three, of two are two, of four is one."""
    costs(lambda size: 0.010)
    options = DecodeOptions(max_new_tokens=20, batch_size=3)
    texts = decoder.decode(GREEDY, make_prompts([3, 17, 9]), options)
    replay = record(decoder, texts, options)
    calls = [text.serial_calls for text in replay.decode(BPD)]
    replayed = []
    decode = type(replay).decode

    def counted(self, method, *rest):
        replayed.append(method.kind)
        return decode(self, method, *rest)

    monkeypatch.setattr(type(replay), "decode", counted)
    predictions = predict(decoder, replay, [BPD], [1, 2, 4])
    assert replayed == ["heads/oracle", "heads/greedy"]
    speedups = {
        b: {p.method: p.speedup for p in predictions[b]}[BPD] for b in predictions
    }
    assert speedups[1] == pytest.approx(60 / sum(calls))
    assert speedups[2] == pytest.approx(40 / (max(calls[:2]) + calls[2]))
    assert speedups[4] == pytest.approx(20 / max(calls))


def test_batches_are_padded_to_the_mesh(prompts, costs, monkeypatch):
    """Two rows become four; the real measurements run on a mesh too."""
    model = make_model(3, num_layers=1, vocab_size=16)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    decoder = Decoder(sharded_model(model, mesh), width=4)
    requests = costs(lambda size: 0.010)
    choose_method(decoder, prompts, OPTIONS, methods=[BPD])
    assert [batch for batch, *_ in requests] == [4]
    assert measure_passes(decoder, 4, 8, [1, 2]).seconds[2] > 0
    assert measure_drafting(decoder, BPD, prompts[0], 2) > 0


def test_drafting_is_timed_without_the_gate_of_drafts(prompts, monkeypatch):
    decoder = Decoder(make_model(3, num_layers=1, vocab_size=16), width=4)
    tasks, task = [], decoder.task

    def recorded(*arguments):
        tasks.append(task(*arguments))
        return tasks[-1]

    monkeypatch.setattr(decoder, "task", recorded)
    for text in ("heads/tree:3:price=1.5", "heads/tree:3"):
        assert measure_drafting(decoder, parse_method(text), prompts[0], 1) > 0
    assert tasks[0].drafter == tasks[1].drafter


def test_predictions_use_the_width_of_the_decoder(prompts, costs):
    """k and alpha default to those of the decoder, even if more was recorded."""
    model = make_model(3, num_layers=1)
    assets = Assets(ngram=make_ngram())
    decoder = Decoder(model, width=2, alpha=0.25, assets=assets)
    texts = decoder.decode(GREEDY, prompts, OPTIONS)
    replay = record(decoder, texts, OPTIONS, width=6)
    costs(lambda size: 0.010)
    names = ["ngram_device:4", "ngram_device:4:k=2:alpha=0.25", "ngram_device:4:k=6"]
    methods = [parse_method(name) for name in names]
    predictions = predicted(decoder, replay, methods, 1)
    default, explicit, wide = (predictions[method] for method in methods)
    assert default.block_efficiency == explicit.block_efficiency
    assert default.nodes == explicit.nodes < wide.nodes


def test_drafting_that_does_not_pay_is_not_chosen(decoder, prompts, costs):
    costs(lambda size: 0.001 * size)
    progress = []
    choice = choose_method(
        decoder, prompts, OPTIONS, methods=[BPD], on_progress=progress.append
    )
    assert choice.method == GREEDY
    assert progress == [GREEDY, BPD]
    assert str(choice).startswith(
        "greedy: no method is predicted to be faster; bpd, predicted at most "
    )
    assert "\n" not in str(choice)


def test_the_fastest_is_chosen_where_passes_are_cheap(decoder, prompts, costs):
    costs(lambda size: 0.010)
    # The trial is greedy even if the options sample.
    options = DecodeOptions(max_new_tokens=20, temperature=0.8)
    choice = choose_method(decoder, prompts, options, methods=[BPD, SEVERAL])
    assert choice.method == SEVERAL
    assert str(choice).startswith("zero_gram:9, predicted ")
    assert str(choice).endswith(". Predicted for greedy decoding.")


@pytest.mark.parametrize(
    "speedups, chosen",
    [
        ({"greedy": 1.0}, "greedy"),
        # Within the error of a prediction.
        ({"bpd": 1.04, "greedy": 1.0}, "greedy"),
        ({"oracle": 3.0, "bpd": 1.5}, "bpd"),
    ],
)
def test_choice_from_predictions(speedups, chosen):
    predictions = [
        Prediction(parse_method(name), 2.0, 8, 0.012, 0.0, speedup)
        for name, speedup in speedups.items()
    ]
    assert Choice.among(predictions).method == parse_method(chosen)


@pytest.mark.parametrize(
    "name, count, message",
    [
        ("bpd", 0, "needs prompts"),
        ("lookahead", 2, "cannot be replayed"),
        ("auto", 2, "name a method"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(
    decoder, prompts, name, count, message
):
    with pytest.raises(UserError, match=message):
        choose_method(decoder, prompts[:count], OPTIONS, methods=[parse_method(name)])


def test_small_models_must_hold_the_texts():
    small = make_model(0, 1, num_layers=1, max_length=40)
    assets = Assets(rescorer=small, draft_model=small)
    decoder = Decoder(make_model(3, num_layers=1), width=4, assets=assets)

    def kinds(length):
        methods = candidate_methods(decoder, make_prompts([3, length]), OPTIONS)
        return {method.kind for method in methods}

    assert (
        kinds(21)
        == kinds(20) - {"heads+neural/best", "draft_model/chains"}
        != kinds(20)
    )


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
    assert decoder.default_method in candidate_methods(decoder)


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
    methods = candidate_methods(decoder)
    for method in methods:
        decoder.drafter(method)
    kinds = {method.kind for method in methods}
    assert ("heads+ngram/best" in kinds) == (block_size > 1)
    assert len(set(methods)) == len(methods)
