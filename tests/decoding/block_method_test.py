"""Drafts of the block drafter in the loop equal those from whole texts."""

import dataclasses
import functools
import sys

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import BATCHED, TREE, DecodeOptions
from bpd_jax.decoding.replay import record
from bpd_jax.drafting.assets import Assets
from bpd_jax.drafting.searches.tree import Tree
from bpd_jax.models.blockwise_config import BlockHeadsConfig
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import parameter_shapes
from tests.decoding.random_models import (
    assert_same,
    make_drafter,
    make_model,
    make_prompts,
    random_params,
    read_texts,
)

LAYERS = (0, 1)
LONGEST = 40  # tokens of a text


@pytest.fixture(scope="module")
def decoder():
    model = make_model(0, block_size=1)
    drafter = make_drafter(model, feature_layers=LAYERS)
    return Decoder(model, width=3, assets=Assets(drafter=drafter))


@functools.partial(jax.jit, static_argnums=1)
def from_whole_text(model, functions, drafter_params, tokens, length, certain):
    """The best tokens after the certain one, from a pass over the whole text."""
    *_, features = read_texts(model, tokens, LAYERS)
    cache = functions.prefill(drafter_params, features, length[None], 64)
    anchor = model.embed(certain[None])
    count = functions.config.block_size - 1
    return functions.candidates(drafter_params, cache, anchor, count, 1)[0][0, :, 0]


def check_drafts(texts, expected, *, shorter=False):
    """Compares all drafts with `expected` of the text, its length and its next token.

    Args:
      texts: what was decoded.
      expected: returns the tokens after the certain one.
      shorter: whether a draft, such as one of a tree, may end earlier.
    """
    for text in texts:
        all_tokens = [*text.input_ids.tolist(), *text.output_ids.tolist()]
        end = len(text.input_ids)
        for draft, accepted in zip(text.proposed, text.accepted, strict=True):
            tokens = np.zeros((1, LONGEST), np.int32)
            tokens[0, :end] = all_tokens[:end]
            want = expected(tokens, np.int32(end), draft[0]).tolist()
            drafted = draft[draft >= 0].tolist()[1:]
            assert drafted == want[: len(drafted)]
            assert len(drafted) == len(want) or shorter
            end += int(accepted)
        assert end == len(all_tokens)


@pytest.mark.parametrize("method", ["block/tree:3", "heads/tree:3"])
def test_positions_that_a_tree_cannot_reach_are_not_drafted(monkeypatch, method):
    model = make_model(0, block_size=5)
    drafter = make_drafter(model, feature_layers=LAYERS)
    tree, options = parse_method(method), DecodeOptions(max_new_tokens=14)

    def decode(depth):
        decoder = Decoder(model, width=3, assets=Assets(drafter=drafter))
        assert decoder.task(tree, options).drafter.max_depth == depth
        return decoder.decode(tree, make_prompts([3, 9]), options)

    few = decode(depth=3)
    monkeypatch.setattr(Tree, "reach", sys.maxsize)
    block = 5 if method.startswith("heads") else drafter.functions.config.block_size
    many = decode(depth=block)
    for one, other in zip(few, many, strict=True):
        np.testing.assert_array_equal(one.accepted, other.accepted)
        np.testing.assert_array_equal(one.proposed, other.proposed[:, :3])


@pytest.mark.parametrize(
    "method, verification",
    [
        ("block/greedy", BATCHED),
        ("block/tree:4", TREE),
        pytest.param("block/best:3", TREE, marks=pytest.mark.exhaustive),
        pytest.param("block/best:3", BATCHED, marks=pytest.mark.exhaustive),
        pytest.param("block/tree:4", BATCHED, marks=pytest.mark.exhaustive),
    ],
)
def test_drafts_equal_those_from_whole_texts(decoder, method, verification):
    """Rows of different lengths, some longer than the drafter's window of 8 tokens."""
    options = DecodeOptions(max_new_tokens=14, batch_size=3, verification=verification)
    texts = decoder.decode(parse_method(method), make_prompts([3, 1, 19]), options)
    drafter = decoder.assets.drafter
    expected = functools.partial(
        from_whole_text, decoder.model, drafter.functions, drafter.params
    )
    check_drafts(texts, expected, shorter="tree" in method)


def test_sizes_that_do_not_fit_are_refused(decoder):
    for method, message in (
        ("block:9/greedy", "2 to 5"),
        ("block:k=10/best:2", "only 9 tokens"),
        ("block+markov/best:2", "needs a trained Markov refiner"),
    ):
        with pytest.raises(UserError, match=message):
            decoder.drafter(parse_method(method))


def test_conditioned_heads_read_the_last_accepted_token():
    """Heads that read the certain token and a layer, against a pass over the text."""
    plain = make_model(1, block_size=1)
    config = dataclasses.replace(
        plain.config,
        heads=BlockHeadsConfig(3, hidden=8, reads_anchor=True, feature_layers=(0,)),
    )
    heads = random_params(parameter_shapes(config)["heads"], 0.5, 0)
    model = Model(config, {**plain.params, "heads": heads})
    decoder = Decoder(model, width=3)
    options = DecodeOptions(max_new_tokens=10, batch_size=2)
    prompts = make_prompts([4, 9])
    greedy = decoder.decode(parse_method("greedy"), prompts, options)
    by_heads = decoder.decode(parse_method("bpd"), prompts, options)

    @jax.jit
    def candidates(tokens, end, certain):
        _, hidden, _, features = read_texts(model, tokens, (0,))
        last = hidden[:, end - 1], features[:, end - 1]
        best_tokens = model.block_candidates(last[0], 3, 1, certain[None], last[1])
        return best_tokens[0][0, :, 0]

    assert_same(by_heads, greedy, "output_ids")
    check_drafts(by_heads, candidates)
    replayed = record(decoder, greedy, options).decode(parse_method("bpd"))
    assert_same(by_heads, replayed, "accepted", "proposed")
