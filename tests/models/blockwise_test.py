import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.errors import UserError
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise import (
    BlockwiseLM,
    count_parameters,
    init_parameters,
    parameter_shapes,
)
from bpd_jax.models.blockwise_config import (
    BlockHeadsConfig,
    BlockwiseConfig,
    load_config,
    save_config,
)
from bpd_jax.models.cache import KeyValues, commit
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.models.transformer_config import TransformerConfig

TRUNK = TransformerConfig(
    vocab_size=23, num_layers=2, d_model=16, d_ff=24, num_heads=4, max_length=32
)
CONFIG = BlockwiseConfig(TRUNK, BlockHeadsConfig(num_heads=3, hidden=8))


@functools.cache
def parameters(config, seed=0, noise=0.2):
    """Random parameters, the zero-initialised ones included."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, noise, leaf.shape), leaf.dtype),
        parameter_shapes(config),
    )


@functools.partial(jax.jit, static_argnums=0)
def forward(config, *arguments):
    return ModelFunctions(config).forward(*arguments)[:2]


def causal_forward(config, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = causal_mask(jnp.ones_like(tokens))
    return forward(config, params, tokens, positions, mask)


@pytest.mark.parametrize("chunks", [[10], [1] * 10, [4, 3, 2, 1], [7, 3]])
def test_any_chunking_with_a_cache_equals_one_pass(chunks):
    params = parameters(CONFIG)
    functions = ModelFunctions(CONFIG)
    tokens = jax.random.randint(jax.random.key(3), (2, 10), 0, 23)
    want, _ = causal_forward(CONFIG, params, tokens)

    cache = functions.empty_cache(2, 20)
    parts = []
    begin = 0
    for size in chunks:
        part = tokens[:, begin : begin + size]
        positions = cache.lengths[:, None] + jnp.arange(size)
        mask = causal_mask(jnp.ones_like(part))
        hidden, new = forward(CONFIG, params, part, positions, mask, cache)
        cache = commit(cache, new, jnp.full((2,), size))
        parts.append(hidden)
        begin += size
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), want, atol=2e-5)


def test_tokens_after_earlier_drafts_equal_one_pass():
    """A tree run level by level: the later nodes see the earlier ones' keys."""
    params = parameters(CONFIG)
    text = jax.random.randint(jax.random.key(4), (2, 5), 0, 23)
    _, new = causal_forward(CONFIG, params, text)
    cache = commit(ModelFunctions(CONFIG).empty_cache(2, 16), new, jnp.array([5, 3]))
    nodes = jax.random.randint(jax.random.key(5), (2, 6), 0, 23)
    # Node:            0  1  2  3  4  5
    parents = np.array([-1, -1, 0, 0, 1, 2])
    depths = jnp.array([0, 0, 1, 1, 1, 2])
    mask = np.eye(6, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    mask = jnp.broadcast_to(mask, (2, 6, 6))
    positions = cache.lengths[:, None] + depths
    want, want_new = forward(CONFIG, params, nodes, positions, mask, cache)

    earlier = KeyValues(jnp.zeros((2, 2, 0, 4, 4)), jnp.zeros((2, 2, 0, 4, 4)))
    hidden = []
    for begin, end in ((0, 2), (2, 5), (5, 6)):
        level = slice(begin, end)
        states, new = forward(
            CONFIG,
            params,
            nodes[:, level],
            positions[:, level],
            mask[:, level, :end],
            cache,
            earlier,
        )
        hidden.append(states)
        earlier = KeyValues(
            jnp.concatenate([earlier.keys, new.keys], axis=2),
            jnp.concatenate([earlier.values, new.values], axis=2),
        )
    np.testing.assert_allclose(jnp.concatenate(hidden, axis=1), want, atol=2e-5)
    np.testing.assert_allclose(earlier.keys, want_new.keys, atol=2e-5)
    np.testing.assert_allclose(earlier.values, want_new.values, atol=2e-5)


def test_later_tokens_and_other_segments_change_nothing():
    params = parameters(CONFIG)
    tokens = np.array([[5, 6, 7, 8, 9, 10]])
    segments = jnp.array([[1, 1, 1, 2, 2, 2]])
    positions = jnp.array([[0, 1, 2, 0, 1, 2]])
    mask = causal_mask(segments)
    packed, _ = forward(CONFIG, params, tokens, positions, mask)
    changed_tokens = tokens.copy()
    changed_tokens[0, 2] = 1
    changed_hidden, _ = forward(CONFIG, params, changed_tokens, positions, mask)
    np.testing.assert_array_equal(packed[0, :2], changed_hidden[0, :2])
    assert np.abs(packed[0, 2] - changed_hidden[0, 2]).max() > 1e-3
    np.testing.assert_array_equal(packed[0, 3:], changed_hidden[0, 3:])
    unpacked, _ = causal_forward(CONFIG, params, jnp.asarray(tokens[:, 3:]))
    np.testing.assert_allclose(packed[0, 3:], unpacked[0], atol=1e-5)


def test_new_heads_start_as_the_language_model():
    params = init_parameters(CONFIG, jax.random.key(0), make_mesh(MeshConfig()))
    hidden = jax.random.normal(jax.random.key(1), (2, 16))
    logits = ModelFunctions(CONFIG).head_logits(params, hidden)
    assert logits.shape == (2, 3, 23)
    for head in range(3):
        np.testing.assert_array_equal(logits[:, head], logits[:, 0])


@pytest.mark.parametrize("first_has_ffn", [False, True])
def test_head_one_is_the_language_model_and_heads_differ(first_has_ffn):
    heads = BlockHeadsConfig(num_heads=3, hidden=8, first_has_ffn=first_has_ffn)
    config = BlockwiseConfig(TRUNK, heads)
    params = parameters(config)
    assert params["heads"]["kernel_in"].shape[0] == 2 + first_has_ffn
    functions = ModelFunctions(config)
    hidden = jax.random.normal(jax.random.key(1), (4, 16))
    logits = functions.head_logits(params, hidden)
    np.testing.assert_allclose(
        logits[:, 0], functions.next_token_logits(params, hidden), atol=1e-5
    )
    assert np.abs(logits[:, 1] - logits[:, 0]).max() > 1e-2
    assert np.abs(logits[:, 2] - logits[:, 1]).max() > 1e-2
    # Head 2 written out: residual, SiLU, softmax tied to the embedding.
    w = {k: v[1 if first_has_ffn else 0] for k, v in params["heads"].items()}
    inner = jax.nn.silu(hidden @ w["kernel_in"] + w["bias_in"])
    state = hidden + inner @ w["kernel_out"] + w["bias_out"]
    want = state @ params["trunk"]["embedding"].T
    np.testing.assert_allclose(logits[:, 1], want, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_parameter_counts_equal_a_hand_count(gated):
    trunk = TransformerConfig(
        23, 2, 16, 24, num_heads=4, head_dim=5, max_length=32, gated=gated
    )
    counts = count_parameters(BlockwiseConfig(trunk, BlockHeadsConfig(3, 8)))
    attention = 3 * (16 * 20 + 20) + 20 * 16 + 16
    feed_forward = (1 + gated) * (16 * 24 + 24) + 24 * 16 + 16
    norms = 2 * (16 + 16)
    want = {
        "embedding": 23 * 16,
        "positions": 32 * 16,
        "blocks": 2 * (attention + feed_forward + norms) + (16 + 16),
        "heads": 2 * (16 * 8 + 8 + 8 * 16 + 16),
    }
    assert counts == {**want, "total": sum(want.values())}


def test_plain_model_has_one_head():
    config = BlockwiseConfig(TRUNK)
    params = parameters(config)
    assert set(params) == {"trunk"}
    hidden = jnp.ones((1, 16))
    logits = ModelFunctions(config).head_logits(params, hidden)
    assert logits.shape == (1, 1, 23)


def test_bfloat16_compute_keeps_float32_parameters_and_logits():
    trunk = TransformerConfig(23, 1, 16, 24, 4, max_length=8, dtype="bfloat16")
    params = parameters(BlockwiseConfig(trunk))
    tokens = jnp.ones((1, 3), jnp.int32)
    hidden, new = causal_forward(BlockwiseConfig(trunk), params, tokens)
    assert hidden.dtype == new.keys.dtype == jnp.bfloat16
    logits = ModelFunctions(BlockwiseConfig(trunk)).next_token_logits(params, hidden)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_all_logits_is_every_head_at_every_position():
    params = parameters(CONFIG)
    tokens = jnp.array([[1, 2, 3]])
    logits = BlockwiseLM(CONFIG).apply(
        {"params": params},
        tokens,
        jnp.arange(3)[None],
        causal_mask(jnp.ones_like(tokens)),
        method="all_logits",
    )
    hidden, _ = causal_forward(CONFIG, params, tokens)
    want = ModelFunctions(CONFIG).head_logits(params, hidden[:, 1])
    np.testing.assert_allclose(logits[:, 1], want, atol=1e-5)


def test_config_round_trip_and_bad_files(tmp_path):
    path = tmp_path / "model.json"
    for config in (CONFIG, BlockwiseConfig(TRUNK)):
        save_config(config, path)
        assert load_config(path) == config
    with pytest.raises(UserError, match=r"missing\.json does not exist"):
        load_config(tmp_path / "missing.json")
    path.write_text('{"trunk": {"layers": 2}}')
    with pytest.raises(UserError, match="does not describe a model"):
        load_config(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_heads": 3}, "not a multiple of num_heads"),
        ({"num_layers": 0}, "num_layers must be an integer"),
        ({"num_layers": 1_000_000}, "num_layers must be an integer"),
        ({"num_heads": 3000}, "num_heads must be an integer"),
        ({"vocab_size": 4_000_000_000}, "vocab_size must be an integer"),
        ({"num_layers": True}, "num_layers must be an integer"),
        ({"activation": "tanh"}, "must be one of gelu, silu, relu"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"dtype": "float64"}, "dtype must be one of"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        TransformerConfig(**{**vars(TRUNK), **change})
