"""The trunk as a Llama: rotary positions, RMSNorm, gates, a softmax of its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.errors import UserError
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise import init_parameters, parameter_shapes
from bpd_jax.models.blockwise_config import (
    BlockHeadsConfig,
    BlockwiseConfig,
    load_config,
    save_config,
)
from bpd_jax.models.cache import commit
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.transformer_config import TransformerConfig

TRUNK = TransformerConfig(
    vocab_size=24,
    num_layers=2,
    d_model=16,
    d_ff=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_length=64,
    activation="silu",
    gated=True,
    use_bias=False,
    qkv_bias=True,
    query_key_norm=True,
    norm="rms",
    rotary=RotaryConfig(100.0, 1.0, "llama3", 8.0, 16),
    tied_softmax=False,
)
LLAMA = BlockwiseConfig(TRUNK, BlockHeadsConfig(num_heads=3, hidden=8))


@functools.cache
def parameters(config):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype),
        parameter_shapes(config),
    )


@functools.partial(jax.jit, static_argnums=0)
def forward(config, *arguments):
    return ModelFunctions(config).forward(*arguments)[:2]


def one_pass(config, tokens, first=0):
    positions = jnp.broadcast_to(first + jnp.arange(tokens.shape[1]), tokens.shape)
    mask = causal_mask(jnp.ones_like(tokens))
    return forward(config, parameters(config), tokens, positions, mask)


def written_out(params, config, tokens):
    """The same trunk for one text, in NumPy and float64, a loop per head."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["trunk"])
    rotary, width = config.rotary, config.head_width
    group = config.num_heads // config.kv_heads
    angles = np.outer(np.arange(len(tokens)), rotary.frequencies(width))

    def norm(x, name, scale=None):
        scale = p[name]["scale"] if scale is None else scale
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    def turn(x):
        a, b = np.split(x, 2, axis=-1)
        cosine, sine = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)

    x = p["embedding"][tokens]
    for layer in range(config.num_layers):
        w, h = p[f"attention_{layer}"], norm(x, f"attention_norm_{layer}")
        for head in range(config.num_heads):

            def project(name, head, h=h, w=w):
                return h @ w[name]["kernel"][:, head] + w[name]["bias"][head]

            q = norm(project("query", head), "", w["query_norm"]["scale"])
            k = norm(project("key", head // group), "", w["key_norm"]["scale"])
            scores = turn(q) @ turn(k).T / np.sqrt(width)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed = weights @ project("value", head // group)
            x = x + mixed @ w["output"]["kernel"][head]
        w, h = p[f"mlp_{layer}"], norm(x, f"mlp_norm_{layer}")
        inner = h @ w["input"]["kernel"]
        inner = inner / (1 + np.exp(-inner)) * (h @ w["gate"]["kernel"])
        x = x + inner @ w["output"]["kernel"]
    return norm(x, "final_norm")


def test_trunk_equals_a_numpy_reference():
    tokens = jax.random.randint(jax.random.key(1), (1, 30), 0, 24)
    hidden, _ = one_pass(LLAMA, tokens)
    want = written_out(parameters(LLAMA), TRUNK, np.asarray(tokens[0]))
    np.testing.assert_allclose(hidden[0], want, atol=2e-4)


def test_outputs_depend_on_relative_positions_only():
    tokens = jax.random.randint(jax.random.key(1), (1, 9), 0, 24)
    hidden, _ = one_pass(LLAMA, tokens)
    shifted, _ = one_pass(LLAMA, tokens, first=40)
    np.testing.assert_allclose(hidden, shifted, atol=1e-4)


@pytest.mark.parametrize("chunks", [[1] * 8, [5, 2, 1]])
def test_any_chunking_with_a_cache_equals_one_pass(chunks):
    tokens = jax.random.randint(jax.random.key(3), (2, 8), 0, 24)
    want, _ = one_pass(LLAMA, tokens)
    cache = ModelFunctions(LLAMA).empty_cache(2, 16)
    parts, begin = [], 0
    for size in chunks:
        part = tokens[:, begin : begin + size]
        positions = cache.lengths[:, None] + jnp.arange(size)
        mask = causal_mask(jnp.ones_like(part))
        hidden, new = forward(LLAMA, parameters(LLAMA), part, positions, mask, cache)
        cache = commit(cache, new, jnp.full((2,), size))
        parts.append(hidden)
        begin += size
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), want, atol=5e-5)


def test_every_path_of_a_tree_equals_one_pass():
    """Positions of nodes are their depths, whatever their index in the row."""
    texts = jax.random.randint(jax.random.key(4), (2, 5), 0, 24)
    lengths = jnp.array([5, 3])
    _, new = one_pass(LLAMA, texts)
    cache = commit(ModelFunctions(LLAMA).empty_cache(2, 16), new, lengths)
    nodes = jax.random.randint(jax.random.key(5), (2, 6), 0, 24)
    parents, depths = [-1, 0, 0, 1, 2, 3], jnp.array([0, 1, 1, 2, 2, 3])
    mask = np.eye(6, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    positions = lengths[:, None] + depths
    masks = jnp.broadcast_to(mask, (2, 6, 6))
    hidden, _ = forward(LLAMA, parameters(LLAMA), nodes, positions, masks, cache)
    for row in range(2):
        for leaf in (4, 5):
            path = np.flatnonzero(mask[leaf])
            text = jnp.concatenate([texts[row, : lengths[row]], nodes[row, path]])
            want, _ = one_pass(LLAMA, text[None])
            np.testing.assert_allclose(
                hidden[row, path], want[0, int(lengths[row]) :], atol=5e-5
            )


def test_heads_use_the_untied_softmax():
    params = parameters(LLAMA)
    hidden = jax.random.normal(jax.random.key(1), (4, 16))
    logits = ModelFunctions(LLAMA).head_logits(params, hidden)
    softmax = params["trunk"]["softmax"]
    np.testing.assert_allclose(logits[:, 0], hidden @ softmax.T, atol=1e-5)
    w = {name: value[0] for name, value in params["heads"].items()}
    inner = jax.nn.silu(hidden @ w["kernel_in"] + w["bias_in"])
    state = hidden + inner @ w["kernel_out"] + w["bias_out"]
    np.testing.assert_allclose(logits[:, 1], state @ softmax.T, atol=1e-4)
    assert np.abs(logits[:, 0] - hidden @ params["trunk"]["embedding"].T).max() > 0.1


def test_parameters_are_those_of_a_llama():
    shapes = parameter_shapes(LLAMA)["trunk"]
    assert "position_embedding" not in shapes
    assert shapes["softmax"].shape == (24, 16)
    assert set(shapes["final_norm"]) == {"scale"}
    attention = shapes["attention_0"]
    assert attention["query"]["bias"].shape == (4, 6)
    assert attention["key_norm"]["scale"].shape == (6,)
    assert set(attention["output"]) == {"kernel"}
    assert set(shapes["mlp_0"]["gate"]) == {"kernel"}


def test_biases_are_configured_separately():
    trunk = dataclasses.replace(TRUNK, qkv_bias=None, output_bias=True, mlp_bias=True)
    shapes = parameter_shapes(BlockwiseConfig(trunk))["trunk"]
    assert "bias" not in shapes["attention_0"]["query"]
    assert shapes["attention_0"]["output"]["bias"].shape == (16,)
    for name, width in (("input", 24), ("gate", 24), ("output", 16)):
        assert shapes["mlp_0"][name]["bias"].shape == (width,)


def test_exact_and_approximate_gelu_differ():
    tokens = jax.random.randint(jax.random.key(1), (1, 9), 0, 24)
    hidden = []
    for activation in ("gelu", "gelu_exact"):
        trunk = dataclasses.replace(TRUNK, activation=activation)
        config = dataclasses.replace(LLAMA, trunk=trunk)
        hidden.append(one_pass(config, tokens)[0])
    difference = np.abs(hidden[0] - hidden[1]).max()
    assert 1e-5 < difference < 1e-1


def test_values_do_not_depend_on_the_mesh(tmp_path):
    replicated, sharded = (
        init_parameters(LLAMA, jax.random.key(0), make_mesh(MeshConfig(*sizes)))
        for sizes in ((8, 1, 1), (2, 2, 2))
    )
    jax.tree.map(np.testing.assert_array_equal, replicated, sharded)
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 24)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    mask = causal_mask(jnp.ones_like(tokens))
    a, b = (
        jax.device_get(forward(LLAMA, params, tokens, positions, mask)[0])
        for params in (replicated, sharded)
    )
    np.testing.assert_allclose(a, b, atol=1e-5)
    save_config(LLAMA, tmp_path / "model.json")
    assert load_config(tmp_path / "model.json") == LLAMA


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head_dim": 5}, "head_dim = 5 is odd"),
        ({"head_dim": 0}, "head_dim must be an integer"),
        ({"num_kv_heads": 0}, "num_kv_heads must be an integer"),
        ({"norm": "batch"}, "norm must be one of layer, rms"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be a finite"),
    ],
)
def test_bad_choices_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TRUNK, **change)


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward_with_layers(config, layers, *arguments):
    return ModelFunctions(config).forward(*arguments, layers=layers)


def test_features_are_the_outputs_of_layers():
    params = parameters(LLAMA)
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, TRUNK.vocab_size, (2, 7)))
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    arguments = (params, tokens, positions, causal_mask(jnp.ones((2, 7), int)))
    plain = forward(LLAMA, *arguments)
    hidden, new, features = forward_with_layers(LLAMA, (1, 0), *arguments)
    # Hidden states and keys must be bitwise equal.
    jax.tree.map(np.testing.assert_array_equal, (hidden, new), plain)
    # The last layer's output is what the final norm normalises.
    last, first = np.split(np.asarray(features), 2, axis=-1)
    scale = params["trunk"]["final_norm"]["scale"]
    variance = np.square(last).mean(-1, keepdims=True) + TRUNK.norm_epsilon
    np.testing.assert_allclose(last * variance**-0.5 * scale, hidden, rtol=1e-4)
    # A model of the first layer alone ends in its output.
    config = dataclasses.replace(LLAMA, trunk=dataclasses.replace(TRUNK, num_layers=1))
    first_layer = {
        name: x for name, x in params["trunk"].items() if not name.endswith("_1")
    }
    features = forward_with_layers(
        config, (0,), {**params, "trunk": first_layer}, *arguments[1:]
    )[2]
    np.testing.assert_array_equal(features, first)


def test_features_with_a_cache_equal_one_pass():
    params = parameters(LLAMA)
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9]])
    positions = jnp.arange(6)[None]
    mask = causal_mask(jnp.ones((1, 6), int))
    expected = forward_with_layers(LLAMA, (0, 1), params, tokens, positions, mask)[2]
    cache = ModelFunctions(LLAMA).empty_cache(1, 8)
    _, new = forward(LLAMA, params, tokens[:, :4], positions[:, :4], mask[:, :4, :4])
    cache = commit(cache, new, jnp.array([4]))
    suffix = (tokens[:, 4:], positions[:, 4:], mask[:, 4:, 4:], cache)
    features = forward_with_layers(LLAMA, (0, 1), params, *suffix)[2]
    np.testing.assert_allclose(features, expected[:, 4:], rtol=1e-4, atol=1e-5)


def test_without_layers_features_are_empty():
    tokens = jnp.zeros((1, 2), int)
    mask = causal_mask(tokens)
    arguments = (parameters(LLAMA), tokens, jnp.arange(2)[None], mask)
    assert forward_with_layers(LLAMA, (), *arguments)[2].shape == (1, 2, 0)


@pytest.mark.parametrize("layers", [(2,), (-1,), (0, 0), (0.0,)])
def test_layers_that_do_not_exist_are_refused(layers):
    tokens = jnp.zeros((1, 2), int)
    mask = causal_mask(tokens)
    arguments = (parameters(LLAMA), tokens, jnp.arange(2)[None], mask)
    with pytest.raises(UserError, match="2 layers"):
        forward_with_layers(LLAMA, layers, *arguments)
