import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise import (
    count_parameters,
    parameter_shapes,
)
from bpd_jax.models.blockwise_config import (
    BlockHeadsConfig,
    BlockwiseConfig,
)
from bpd_jax.models.functions import ModelFunctions
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


def test_bfloat16_compute_keeps_float32_parameters_and_logits():
    trunk = TransformerConfig(23, 1, 16, 24, 4, max_length=8, dtype="bfloat16")
    params = parameters(BlockwiseConfig(trunk))
    tokens = jnp.ones((1, 3), jnp.int32)
    hidden, new = causal_forward(BlockwiseConfig(trunk), params, tokens)
    assert hidden.dtype == new.keys.dtype == jnp.bfloat16
    logits = ModelFunctions(BlockwiseConfig(trunk)).next_token_logits(params, hidden)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
