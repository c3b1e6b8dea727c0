"""Methods that run small networks along the draft; see also `lossless_test`."""

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import SPECULATIVE, DecodeOptions
from bpd_jax.decoding.replay import record
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
    ],
)
def test_refiners_that_do_not_fit_are_refused(kind, refiner_kind, heads, message):
    model = make_model(0, block_size=LENGTH, num_layers=1)
    assets = Assets(**{kind: make_refiner(refiner_kind, heads=heads)})
    with pytest.raises(UserError, match=message):
        Decoder(model, width=WIDTH, assets=assets).drafter(parse_method(kind))


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


def test_the_lattice_is_no_wider_than_the_draft_vocabulary():
    # The vocabulary has 13 tokens, so that a decoder may have a width of 8.
    model = make_model(draft_vocabulary=7)
    refiners = {kind: make_refiner(kind) for kind in ("markov", "hydra")}
    decoder = Decoder(model, width=8, assets=Assets(ngram=make_ngram(), **refiners))
    for name in ("zero_gram:2", "medusa:4", "ngram_device:2", "hydra:3", "oracle"):
        with pytest.raises(UserError, match=r"lattice_width = 8 .* only 7 tokens"):
            decoder.drafter(parse_method(name))
        decoder.drafter(parse_method(f"{name}:k=7"))
    for name in ("greedy", "bpd", "prompt_lookup:3"):
        decoder.drafter(parse_method(name))
    options = DecodeOptions(max_new_tokens=4)
    texts = decoder.decode(parse_method("greedy"), make_prompts([5]), options)
    assert record(decoder, texts, options, width=10).model.width == 7
