"""Lattice sources with a memory, driven by hand along a text."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.drafting.interface import BoundModel, Outcome, Prompts, View
from bpd_jax.drafting.sources.block import Block, BlockSource
from bpd_jax.drafting.sources.conditioned_heads import ConditionedHeadsSource
from bpd_jax.errors import UserError
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.config import BlockHeadsConfig, BlockwiseConfig, TransformerConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions, with_softmax
from bpd_jax.models.functions import ModelFunctions

TRUNK = TransformerConfig(17, 2, 8, 12, 2, max_length=64)
HEADS = BlockHeadsConfig(3, 6, reads_anchor=True, feature_layers=(1,))
MODEL = ModelFunctions(BlockwiseConfig(TRUNK, HEADS))
DRAFTER = DrafterFunctions(
    BlockDrafterConfig(feature_layers=(0, 1), block_size=4, window=5), TRUNK
)
LENGTHS = np.array([3, 7])
WIDTH = 3


def draw(shapes, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype), shapes
    )


@pytest.fixture(scope="module")
def model():
    return BoundModel(MODEL, draw(parameter_shapes(MODEL.config), 0))


@pytest.fixture(scope="module")
def drafter(model):
    params = draw(jax.eval_shape(DRAFTER.init, jax.random.key(0)), 1)
    softmax = model.params["trunk"]["embedding"]
    return BlockSource(DRAFTER, 4, WIDTH, with_softmax(params, softmax, None))


@pytest.fixture(scope="module")
def text(model):
    """Two rows, and of each layer the outputs at every token."""
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 17, (2, 32)))
    positions = jnp.broadcast_to(jnp.arange(32), tokens.shape)
    mask = causal_mask(jnp.ones_like(tokens))
    hidden, _, features = MODEL.forward_with_features(
        model.params, tokens, positions, mask, layers=(0, 1)
    )
    return tokens, hidden, {0: features[..., :8], 1: features[..., 8:]}


def along(model, source, text):
    """The lattices of four calls that accept 2 and 0, 4 and 1, 1 and 4 tokens."""
    tokens, hidden, outputs = text
    features = jnp.concatenate([outputs[n] for n in source.feature_layers], -1)
    lengths = jnp.asarray(LENGTHS)
    prompts = Prompts(tokens, lengths, features[:, :7])
    memory = source.remember(source.arrays, prompts)
    for counts in ((2, 0), (4, 1), (1, 4), (0, 0)):
        rows = jnp.arange(2)
        view = View(
            tokens,
            lengths,
            tokens[rows, lengths],
            hidden[rows, lengths - 1],
            jax.random.split(jax.random.key(0), 2),
            model,
        )
        state, memory = source.start(view, source.arrays, memory)
        yield lengths, view, source.lattice(state)
        places = lengths[:, None] + jnp.arange(4)
        path = jnp.take_along_axis(features, places[..., None], axis=1)
        outcome = Outcome(None, None, jnp.asarray(counts), path)
        memory = source.learn(source.arrays, memory, outcome)
        lengths += jnp.asarray(counts)


def test_a_block_drafter_sees_the_accepted_tokens(model, drafter, text):
    outputs = text[2]
    features = jnp.concatenate([outputs[0], outputs[1]], -1)
    for lengths, view, lattice in along(model, drafter, text):
        # The memory is equal to that of a prompt of all accepted tokens.
        cache = DRAFTER.prefill(drafter.arrays, features, lengths, 32)
        anchors = model.embed(view.next_token)
        tokens, log_probs, entropies = DRAFTER.candidates(
            drafter.arrays, cache, anchors, WIDTH
        )
        assert lattice.tokens.shape == (2, 4, WIDTH)
        np.testing.assert_array_equal(lattice.tokens[:, 0, 0], view.next_token)
        np.testing.assert_array_equal(lattice.tokens[:, 1:], tokens)
        np.testing.assert_allclose(lattice.log_probs[:, 1:], log_probs, rtol=1e-4)
        np.testing.assert_allclose(lattice.entropies[:, 1:], entropies, rtol=1e-4)


def test_shorter_blocks_are_the_first_positions(model, drafter, text):
    short = dataclasses.replace(drafter, block_size=2)
    whole, part = (next(along(model, s, text))[2] for s in (drafter, short))
    np.testing.assert_array_equal(part.tokens, whole.tokens[:, :2])


def test_conditioned_heads_read_the_last_accepted_token(model, text):
    source = ConditionedHeadsSource(3, WIDTH, (1,))
    for lengths, view, lattice in along(model, source, text):
        tokens, log_probs, _ = MODEL.block_candidates(
            model.params,
            view.hidden,
            3,
            WIDTH,
            view.next_token,
            text[2][1][jnp.arange(2), lengths - 1],
        )
        np.testing.assert_array_equal(lattice.tokens[:, 1:], tokens)
        np.testing.assert_allclose(lattice.log_probs[:, 1:], log_probs, rtol=1e-5)


def test_settings_are_checked_against_the_drafter(drafter):
    context = types.SimpleNamespace(
        method="block", width=5, need=lambda name: (DRAFTER, drafter.arrays)
    )
    search = types.SimpleNamespace(drafts=1)
    built = Block(tokens=3).build(context, search)
    assert (built.block_size, built.width) == (3, 5)
    assert built.feature_layers == (0, 1)
    with pytest.raises(UserError, match="2 to 4"):
        Block(tokens=5).build(context, search)
    with pytest.raises(UserError, match="17"):
        Block(k=18).build(context, search)
