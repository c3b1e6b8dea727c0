"""Will it pay? Predictions from costs that are set here, not measured."""

import pytest

from bpd_jax.decoding import payoff
from bpd_jax.decoding.assets import Assets
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.methods import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.payoff import (
    Choice,
    PassCosts,
    Prediction,
    candidate_methods,
    choose_method,
    predict,
)
from bpd_jax.decoding.replay import record
from bpd_jax.errors import UserError

OPTIONS = DecodeOptions(max_new_tokens=20, batch_size=2)
BPD, SEVERAL = parse_method("bpd"), parse_method("zero_gram:9")


@pytest.fixture(scope="module")
def decoder(make_model):
    return Decoder(*make_model(3, num_layers=1), width=4)


@pytest.fixture(scope="module")
def prompts(make_prompts):
    return make_prompts([3, 17])


@pytest.fixture(scope="module")
def replay(decoder, prompts):
    return record(decoder, decoder.decode(GREEDY, prompts, OPTIONS), OPTIONS)


@pytest.fixture
def costs(monkeypatch):
    """Sets what a pass costs by M, and drafting by the method's kind."""

    def give(passes, drafting=lambda method: 0.0):
        asked = []

        def measure_passes(decoder, batch_size, text_length, sizes):
            asked.append((batch_size, text_length, list(sizes)))
            return PassCosts(batch_size, {size: passes(size) for size in sizes})

        monkeypatch.setattr(payoff, "measure_passes", measure_passes)
        monkeypatch.setattr(
            payoff, "measure_drafting", lambda decoder, method, *rest: drafting(method)
        )
        return asked

    return give


@pytest.mark.parametrize(
    "nodes, seconds",
    [(1, 1.0), (2, 1.5), (4, 2.5), (5, 3.5), (8, 6.5), (12, 10.5)],
)
def test_costs_are_linear_between_and_beyond_what_was_measured(nodes, seconds):
    """1 and 2 and 4 were measured, slope 1/2, then 8, slope 1."""
    costs = PassCosts(1, {1: 1.0, 2: 1.5, 4: 2.5, 8: 6.5})
    assert costs.at(nodes) == pytest.approx(seconds)


def test_one_measurement_is_all_there_is_to_know():
    assert PassCosts(1, {4: 2.5}).at(9) == 2.5


def test_the_speedup_is_that_of_the_formula(decoder, replay, costs):
    """A pass takes 10 ms and 1 ms per token; drafting by several takes 5 ms."""
    asked = costs(
        lambda size: 0.010 + 0.001 * size,
        lambda method: 0.005 if method == SEVERAL else 0.0,
    )
    found = {p.method: p for p in predict(decoder, replay, [BPD, SEVERAL], 2)}
    # 20 new tokens after 3 and 17: in the middle 30.
    assert [(batch, length) for batch, length, _ in asked] == [(2, 30)]
    assert asked[0][2][-1] >= found[SEVERAL].nodes > found[BPD].nodes == 4
    for method, drafting in ((GREEDY, 0), (BPD, 0), (SEVERAL, 0.005)):
        texts = decoder.decode(method, [t.input_ids for t in replay.texts], OPTIONS)
        tokens = sum(len(text.output_ids) for text in texts)
        efficiency = tokens / sum(text.serial_calls for text in texts)
        prediction = found[method]
        assert prediction.block_efficiency == pytest.approx(efficiency)
        call = 0.010 + 0.001 * prediction.nodes + drafting
        if prediction.draft_seconds is not None:
            assert prediction.speedup == pytest.approx(efficiency * 0.011 / call)
    assert found[GREEDY].speedup == 1.0


def test_free_passes_rank_methods_by_block_efficiency(decoder, replay, costs):
    costs(lambda size: 0.010)
    found = predict(decoder, replay, [BPD, SEVERAL], 1)
    assert [p.method for p in found] == [SEVERAL, BPD, GREEDY]
    efficiencies = [p.block_efficiency for p in found]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert [p.speedup for p in found] == pytest.approx(efficiencies)


def test_what_loses_anyhow_is_not_timed_and_comes_last(decoder, replay, costs):
    costs(lambda size: 0.001 * size, lambda method: pytest.fail("timed"))
    found = predict(decoder, replay, [SEVERAL, BPD], 1)
    assert [p.method for p in found] == [GREEDY, BPD, SEVERAL]
    assert [p.draft_seconds for p in found] == [0.0, None, None]
    assert found[0].speedup == 1.0 > found[1].speedup > found[2].speedup


def test_lattices_are_as_wide_as_the_decoder_says(
    make_model, make_ngram, prompts, costs
):
    """Whatever was recorded for methods that name a larger k; likewise the weight."""
    model = make_model(3, num_layers=1)
    assets = Assets(ngram=make_ngram())
    decoder = Decoder(*model, width=2, alpha=0.25, assets=assets)
    texts = decoder.decode(GREEDY, prompts, OPTIONS)
    replay = record(decoder, texts, OPTIONS, width=6)
    costs(lambda size: 0.010)
    names = ["ngram_device:4", "ngram_device:4:k=2:alpha=0.25", "ngram_device:4:k=6"]
    methods = [parse_method(name) for name in names]
    found = {p.method: p for p in predict(decoder, replay, methods, 1)}
    open_, closed, wide = (found[method] for method in methods)
    assert open_.block_efficiency == closed.block_efficiency
    assert open_.nodes == closed.nodes < wide.nodes


def test_drafting_that_does_not_pay_is_not_chosen(decoder, prompts, costs):
    costs(lambda size: 0.001 * size)
    told = []
    choice = choose_method(
        decoder, prompts, OPTIONS, methods=[BPD], on_progress=told.append
    )
    assert choice.method == GREEDY
    assert told == [GREEDY, BPD]
    assert str(choice).startswith(
        "greedy: drafting does not pay here; the best would be bpd, predicted at most "
    )
    assert "\n" not in str(choice)


def test_the_fastest_is_chosen_where_passes_are_cheap(decoder, prompts, costs):
    costs(lambda size: 0.010)
    # Sampling and stop texts are no matter of the trial.
    options = DecodeOptions(max_new_tokens=20, temperature=0.8, stop=("x",))
    choice = choose_method(decoder, prompts, options, methods=[BPD, SEVERAL])
    assert choice.method == SEVERAL
    assert str(choice).startswith("zero_gram:9, predicted ")


def prediction(name, speedup, drafting):
    return Prediction(parse_method(name), 2.0, 8, 0.012, drafting, speedup)


def test_a_choice_in_words():
    plain = prediction("greedy", 1.0, 0.0)
    choice = Choice.among([prediction("bpd", 1.5, 0.0005), plain])
    assert str(choice) == (
        "bpd, predicted 1.50 times plain decoding (block efficiency 2.00, a call over "
        "8 tokens 12.00 ms, drafting 0.50 ms)."
    )
    choice = Choice.among([plain, prediction("bpd", 0.8, None)])
    assert str(choice) == (
        "greedy: drafting does not pay here; the best would be bpd, predicted at most "
        "0.80 times plain decoding (block efficiency 2.00, a call over 8 tokens 12.00 "
        "ms, drafting free)."
    )


def test_a_gain_within_the_error_of_a_prediction_is_no_gain():
    plain = prediction("greedy", 1.0, 0.0)
    assert Choice.among([prediction("bpd", 1.04, 0.0), plain]).method == GREEDY


def test_there_must_be_prompts(decoder):
    with pytest.raises(UserError, match="needs prompts"):
        choose_method(decoder, [], OPTIONS)


@pytest.mark.parametrize("block_size, width", [(1, 4), (2, 3), (4, 2), (4, 8)])
def test_every_candidate_can_be_made(make_model, make_ngram, block_size, width):
    """Also where a lattice has fewer paths than the larger sizes ask for."""
    functions, params = make_model(0, block_size, num_layers=1)
    decoder = Decoder(functions, params, width=width, assets=Assets(ngram=make_ngram()))
    methods = candidate_methods(decoder)
    for method in methods:
        decoder.drafter(method)
    kinds = {method.kind for method in methods}
    assert ("ngram" in kinds) == (block_size > 1)
    assert len(set(methods)) == len(methods)
