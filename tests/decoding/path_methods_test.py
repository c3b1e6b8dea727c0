"""Methods that run small networks along the draft; see also `lossless_test`."""

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import SPECULATIVE, DecodeOptions
from bpd_jax.drafting.assets import Assets
from tests.decoding.random_models import (
    make_model,
    make_ngram,
    make_prompts,
    make_refiner,
)

VOCAB, LENGTH, WIDTH = 13, 3, 3


@pytest.fixture(scope="module")
def decoder():
    small = make_model(5, block_size=1, num_layers=1)
    assets = Assets(ngram=make_ngram(), rescorer=small, draft_model=small)
    model = make_model(0, block_size=LENGTH, num_layers=1)
    return Decoder(model, width=WIDTH, assets=assets)


@pytest.fixture(scope="module")
def prompts():
    return make_prompts([5, 1, 30])


def test_reach_of_the_small_model_includes_lookup(decoder):
    def reach(name):
        drafter = decoder.drafter(parse_method(name))
        return getattr(drafter, "first", drafter).paths.others[0].small.reach

    assert reach("neural") == LENGTH
    assert reach("neural:lookup=1") == LENGTH
    # The certain token and six copied ones.
    assert reach("neural:lookup=6") == 7


@pytest.mark.parametrize("acceptance", ["exact", SPECULATIVE])
def test_draft_model_equal_to_the_model_is_always_accepted(prompts, acceptance):
    model = make_model(0, block_size=1, num_layers=1)
    assets = Assets(draft_model=model)
    decoder = Decoder(model, width=WIDTH, assets=assets)
    temperature = 0.0 if acceptance == "exact" else 0.8
    options = DecodeOptions(
        max_new_tokens=20, temperature=temperature, acceptance=acceptance
    )
    # All tokens are candidates, so that its distributions equal the model's.
    method = parse_method(f"draft_model:4:k={VOCAB}")
    for generation in decoder.decode(method, prompts, options):
        assert generation.accepted.tolist() == [5] * 4
        assert generation.block_efficiency == 5


@pytest.mark.parametrize(
    "name, message",
    [
        ("draft_model:4:k=2:drafts=3", "different first tokens"),
        ("draft_model:600:drafts=2", "more than 1024"),
        ("draft_model:4:k=14", "13 tokens"),
        ("neural:2:search=exact", "search=beam"),
        ("medusa_ngram:8:normalise=0", "not have the setting normalise"),
    ],
)
def test_settings_that_do_not_fit_are_refused(decoder, name, message):
    with pytest.raises(UserError, match=message):
        decoder.drafter(parse_method(name))


@pytest.mark.parametrize(
    "kind, refiner_kind, heads, message",
    [
        ("markov", "hydra", LENGTH, "pass it as --hydra"),
        ("hydra", "hydra", 5, "5 heads"),
        ("recurrent", None, LENGTH, "train one with"),
    ],
)
def test_refiners_that_do_not_fit_are_refused(kind, refiner_kind, heads, message):
    model = make_model(0, block_size=LENGTH, num_layers=1)
    refiner = refiner_kind and make_refiner(refiner_kind, heads=heads)

    def build():
        decoder = Decoder(model, width=WIDTH, assets=Assets(**{kind: refiner}))
        return decoder.drafter(parse_method(kind))

    with pytest.raises(UserError, match=message):
        build()


@pytest.mark.parametrize("name", ["neural", "draft_model"])
def test_texts_longer_than_the_small_model_reads_are_refused(prompts, name):
    small = make_model(5, block_size=1, num_layers=1, max_length=40)
    assets = Assets(rescorer=small, draft_model=small)
    model = make_model(0, block_size=LENGTH, num_layers=1)
    decoder = Decoder(model, width=WIDTH, assets=assets)
    options = DecodeOptions(max_new_tokens=15)
    message = "prompt 3 has 30 tokens, but the small model holds 40"
    for run in (decoder.check, decoder.decode):
        with pytest.raises(UserError, match=message):
            run(parse_method(name), prompts, options)
    with pytest.raises(UserError, match="prompt 1 has 30 tokens"):
        decoder.stream(parse_method(name), prompts[2], options)
