"""Decoding with a draft vocabulary is lossless."""

import dataclasses

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.replay import record
from bpd_jax.drafting.assets import Assets
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.model import Model
from bpd_jax.models.refiner_files import LoadedRefiner
from bpd_jax.models.trained_refiners import HydraConfig, MarkovConfig, init_refiner
from tests.decoding.random_models import (
    assert_same,
    make_model,
    make_ngram,
    make_prompts,
    random_heads,
    random_params,
)

VOCABULARY = np.array([0, 2, 3, 5, 7, 8, 11], np.int32)


@pytest.fixture(scope="module")
def model():
    """A random model of 13 tokens with a draft vocabulary of 7."""
    plain = make_model()
    heads = BlockHeadsConfig(4, 8, draft_vocabulary=len(VOCABULARY))
    trunk = plain.config.trunk
    head_params = random_heads(BlockwiseConfig(trunk), plain.params, heads, VOCABULARY)
    params = {"trunk": plain.params["trunk"], "heads": head_params}
    return Model(BlockwiseConfig(trunk, heads), params)


@pytest.fixture(scope="module")
def assets():
    def refiner(config):
        shapes = jax.eval_shape(lambda: init_refiner(config, jax.random.key(1)))
        return LoadedRefiner(config, random_params(shapes, 0.5, 1), {})

    return Assets(
        ngram=make_ngram(),
        markov=refiner(MarkovConfig(13, 16, 4, rank=4)),
        hydra=refiner(HydraConfig(13, 16, 4, width=8)),
    )


@pytest.mark.parametrize(
    "name",
    [
        *("zero_gram:4", "markov:3", "hydra:3"),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("bpd", "medusa:8", "ngram_device:3")
        ),
    ],
)
def test_text_equals_that_of_plain_decoding(name, model, assets):
    decoder = Decoder(model, width=4, assets=assets)
    prompts = make_prompts([5, 1, 9])
    options = DecodeOptions(max_new_tokens=30)
    want = decoder.decode(parse_method("greedy"), prompts, options)
    outputs = decoder.decode(parse_method(name), prompts, options)
    assert_same(outputs, want, "output_ids")
    for text in outputs:
        drafted = {token for draft in text.drafts for token in draft[1:]}
        # -1 pads shorter drafts.
        assert drafted - {-1} <= set(VOCABULARY.tolist())


def test_more_candidates_than_tokens_are_refused(model, assets):
    decoder = Decoder(model, width=4, assets=assets)
    with pytest.raises(UserError, match="only 7 tokens to choose from"):
        decoder.drafter(parse_method("zero_gram:2:k=8"))


def test_the_lattice_is_no_wider_than_the_draft_vocabulary(model, assets):
    # The vocabulary has 13 tokens, so that a decoder may have a width of 8.
    decoder = Decoder(model, width=8, assets=assets)
    for name in ("zero_gram:2", "medusa:4", "ngram_device:2", "hydra:3", "oracle"):
        with pytest.raises(UserError, match=r"lattice_width = 8 .* only 7 tokens"):
            decoder.drafter(parse_method(name))
        decoder.drafter(parse_method(f"{name}:k=7"))
    for name in ("greedy", "bpd", "prompt_lookup:3"):
        decoder.drafter(parse_method(name))


def test_a_replay_records_no_more_than_the_draft_vocabulary(model):
    decoder = Decoder(model, width=4)
    options = DecodeOptions(max_new_tokens=4)
    texts = decoder.decode(parse_method("greedy"), make_prompts([5]), options)
    assert record(decoder, texts, options, width=10).model.width == 7


def test_model_without_heads_has_no_draft_vocabulary(model):
    config = dataclasses.replace(model.config, heads=None)
    assert model.config.draft_vocab_size == 7
    assert config.draft_vocab_size == 13
