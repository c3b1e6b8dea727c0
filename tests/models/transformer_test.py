"""The trunk as a Llama: caches, trees, windows and outputs of layers.

`tests/formats/huggingface_test.py` compares it with transformers.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.cache import KeyValues, commit
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import init_boxed, parameter_shapes
from bpd_jax.models.partitioning import unbox
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.transformer_config import (
    TransformerConfig,
    check_feature_layers,
)
from tests.decoding import random_models
from tests.decoding.random_models import make_model, random_params

OPTIONS = {
    "head_dim": 6,
    "qkv_bias": True,
    "query_key_norm": True,
    "rotary": RotaryConfig(100.0, 1.0, "llama3", 8.0, 16),
    "tied_softmax": False,
}
TRUNK = TransformerConfig(24, 2, 16, 24, 4, 2, **{**random_models.LLAMA, **OPTIONS})
LLAMA = BlockwiseConfig(TRUNK)


@functools.cache
def parameters(config):
    return random_params(parameter_shapes(config), 0.3, 0)


@functools.partial(jax.jit, static_argnums=0, static_argnames="layers")
def forward(config, params, *arguments, layers=()):
    return Model(config, params).forward(*arguments, layers=layers)


def triangle(rows, length):
    """The mask of texts without padding."""
    return np.broadcast_to(np.tri(length, dtype=bool), (rows, length, length))


def one_pass(config, tokens, layers=()):
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    mask = triangle(*tokens.shape)
    params = parameters(config)
    return forward(config, params, tokens, positions, mask, layers=layers)


def test_every_path_of_a_tree_equals_one_pass():
    """Positions of nodes are their depths; also if a tree is run level by level."""
    rng = np.random.default_rng(4)
    texts = rng.integers(0, 24, (2, 5)).astype(np.int32)
    lengths = np.array([5, 3], np.int32)
    _, new, _ = one_pass(LLAMA, texts)
    cache = commit(Model(LLAMA).empty_cache(2, 16), new, lengths)
    nodes = rng.integers(0, 24, (2, 6)).astype(np.int32)
    parents, depths = [-1, 0, 0, 1, 2, 3], np.array([0, 1, 1, 2, 2, 3], np.int32)
    mask = np.eye(6, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    positions = lengths[:, None] + depths
    masks = np.broadcast_to(mask, (2, 6, 6))
    params = parameters(LLAMA)
    hidden, new, _ = forward(LLAMA, params, nodes, positions, masks, cache)
    # The whole texts of all paths are the rows of one batch.
    whole, places = np.zeros((4, 9), np.int32), []
    for row, leaf in itertools.product(range(2), (4, 5)):
        path, length = np.flatnonzero(mask[leaf]), int(lengths[row])
        text = [*texts[row, :length], *nodes[row, path]]
        whole[len(places), : len(text)] = text
        places.append((row, path, slice(length, len(text))))
    want = np.asarray(one_pass(LLAMA, whole)[0])
    for index, (row, path, part) in enumerate(places):
        np.testing.assert_allclose(
            np.asarray(hidden)[row, path], want[index, part], atol=5e-5
        )
    # The later levels see the keys of the earlier ones.
    earlier = KeyValues(jnp.zeros((2, 2, 0, 2, 6)), jnp.zeros((2, 2, 0, 2, 6)))
    levels = []
    for begin, end in ((0, 3), (3, 6)):
        level = slice(begin, end)
        arguments = (nodes[:, level], positions[:, level], masks[:, level, :end])
        states, added, _ = forward(LLAMA, params, *arguments, cache, earlier)
        levels.append(states)
        earlier = jax.tree.map(
            lambda *both: jnp.concatenate(both, axis=2), earlier, added
        )
    np.testing.assert_allclose(jnp.concatenate(levels, axis=1), hidden, atol=5e-5)
    for got, want in zip(jax.tree.leaves(earlier), jax.tree.leaves(new), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-5)


def test_features_are_the_outputs_of_layers():
    params = parameters(LLAMA)
    tokens = np.random.default_rng(6).integers(0, 24, (2, 8)).astype(np.int32)
    plain = one_pass(LLAMA, tokens)
    assert plain[2].shape == (2, 8, 0)
    hidden, new, features = one_pass(LLAMA, tokens, layers=(1, 0))
    # Hidden states and keys must be bitwise equal.
    jax.tree.map(np.testing.assert_array_equal, (hidden, new), plain[:2])
    # The last layer's output is what the final norm normalises.
    last, first = np.split(np.asarray(features), 2, axis=-1)
    scale = params["trunk"]["final_norm"]["scale"]
    variance = np.square(last).mean(-1, keepdims=True) + TRUNK.norm_epsilon
    np.testing.assert_allclose(last * variance**-0.5 * scale, hidden, rtol=1e-4)
    # A model of the first layer alone ends in its output.
    config = BlockwiseConfig(dataclasses.replace(TRUNK, num_layers=1))
    first_layer = {
        name: x for name, x in params["trunk"].items() if not name.endswith("_1")
    }
    positions = np.broadcast_to(np.arange(8), (2, 8))
    mask = triangle(*tokens.shape)
    arguments = ({"trunk": first_layer}, tokens, positions, mask)
    features = forward(config, *arguments, layers=(0,))[2]
    np.testing.assert_array_equal(features, first)


@pytest.mark.parametrize("layers", [(2,), (-1,), (0, 0), (0.0,)])
def test_layers_that_do_not_exist_are_refused(layers):
    with pytest.raises(UserError, match="2 layers"):
        check_feature_layers(layers, 2)


def test_a_block_is_traced_once_for_all_layers_of_a_kind():
    """Here the first of three layers has a sliding window."""
    trunk = dataclasses.replace(TRUNK, num_layers=3, window=4, windowed_layers=(0,))
    params = parameters(BlockwiseConfig(trunk))
    tokens = jnp.ones((1, 8), jnp.int32)
    mask = triangle(*tokens.shape)
    model = Model(BlockwiseConfig(trunk), params)
    traced = jax.make_jaxpr(model.forward)(tokens, tokens, mask)
    blocks = [
        id(equation.params["jaxpr"])
        for equation in traced.jaxpr.eqns
        if equation.params.get("name") == "_run_block"
    ]
    assert len(blocks) == 3
    assert blocks[1] == blocks[2] != blocks[0]


def test_shapes_are_those_of_initial_parameters():
    for config in (LLAMA, BlockwiseConfig(dataclasses.replace(TRUNK, num_layers=11))):
        init = functools.partial(init_boxed, config, jax.random.key(0))
        shapes = parameter_shapes(config)
        assert shapes == unbox(jax.eval_shape(init))
        assert list(shapes["trunk"]) == sorted(shapes["trunk"])


@jax.jit
def read(model, *arguments):
    """Logits of a pass, and the keys and values."""
    hidden, new, _ = model.forward(*arguments)
    return model.next_token_logits(hidden), new


@pytest.mark.parametrize("layers", [None, (1,)])
def test_windows_hold_with_the_cache(layers):
    """`tests/formats/huggingface_test.py` has windows of whole texts."""
    sizes = {"num_layers": 2, "max_length": 64, "rotary": RotaryConfig()}
    model = make_model(3, 4, 14, window=6, windowed_layers=layers, **sizes)
    text = jnp.asarray(np.random.default_rng(0).integers(1, 14, (1, 20)), jnp.int32)
    mask = causal_mask(jnp.ones_like(text))
    want, new = read(model, text, jnp.arange(20)[None], mask)

    # The last five tokens after a cache, as one chain and as two separate chains.
    start = 15
    first = jax.tree.map(lambda x: x[:, :, :start], new)
    cache = commit(model.empty_cache(1, 40), first, jnp.array([start]))
    tokens, positions = text[:, start:], jnp.arange(start, 20)[None]
    chain = jnp.tril(jnp.ones((1, 5, 5), bool))
    logits, _ = read(model, tokens, positions, chain, cache)
    np.testing.assert_allclose(logits, want[:, start:], atol=1e-4)
    logits, _ = read(
        model,
        jnp.tile(tokens, (1, 2)),
        jnp.tile(positions, (1, 2)),
        jnp.tile(chain[:, None], (1, 2, 1, 1)),
        cache,
    )
    np.testing.assert_allclose(logits, jnp.tile(want[:, start:], (1, 2, 1)), atol=1e-4)
