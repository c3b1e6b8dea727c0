import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.block_heads import init_heads
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import count_parameters, parameter_shapes
from bpd_jax.models.products import SOFTMAX
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import random_heads, random_params

TRUNK = TransformerConfig(23, 1, 16, 24, 4, max_length=32)
VOCABULARY = np.array([1, 4, 5, 9, 12, 20, 22], np.int32)
HEADS = {
    "draft vocabulary": BlockHeadsConfig(4, 8, draft_vocabulary=7),
    "own softmax": BlockHeadsConfig(4, 8, own_softmax=True),
    "own and draft": BlockHeadsConfig(4, 8, own_softmax=True, draft_vocabulary=7),
    "medusa": BlockHeadsConfig(4, kind="medusa", layers=2, draft_vocabulary=7),
}
# Compiled as wholes: operation by operation they would take longer.
head_logits = jax.jit(Model.head_logits)
block_candidates = jax.jit(Model.block_candidates, static_argnums=(2, 3))


@functools.cache
def model(name, tied=True):
    """Random parameters with a draft vocabulary of its own."""
    config = HEADS[name]
    trunk = TransformerConfig(23, 1, 16, 24, 4, max_length=32, tied_softmax=tied)
    base = BlockwiseConfig(trunk)
    params = random_params(parameter_shapes(base), 0.3, 0)
    heads = random_heads(base, params, config, VOCABULARY)
    return BlockwiseConfig(trunk, config), {**params, "heads": heads}


def states():
    return jnp.asarray(np.random.default_rng(2).normal(0, 1, (5, 16)), jnp.float32)


@pytest.mark.parametrize("first_has_ffn", [False, True])
def test_head_one_is_the_language_model_and_heads_differ(first_has_ffn):
    heads = BlockHeadsConfig(num_heads=3, hidden=8, first_has_ffn=first_has_ffn)
    config = BlockwiseConfig(TRUNK, heads)
    params = random_params(parameter_shapes(config), 0.3, 0)
    assert params["heads"]["kernel_in"].shape[0] == 2 + first_has_ffn
    bound = Model(config, params)
    hidden = states()
    logits = head_logits(bound, hidden)
    np.testing.assert_allclose(logits[:, 0], bound.next_token_logits(hidden), atol=1e-5)
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
    # A draft vocabulary's rows of the softmax are copies.
    heads = BlockHeadsConfig(3, 8, draft_vocabulary=7 if gated else None)
    counts = count_parameters(BlockwiseConfig(trunk, heads))
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


@pytest.mark.parametrize("tied", [True, False])
def test_draft_vocabulary_equals_the_full_one_restricted(tied):
    config, params = model("draft vocabulary", tied)
    full = BlockwiseConfig(config.trunk, BlockHeadsConfig(4, 8))
    layers = {
        name: value
        for name, value in params["heads"].items()
        if name not in ("vocabulary", "softmax")
    }
    full_params = {"trunk": params["trunk"], "heads": layers}
    hidden = states()
    full_logits = head_logits(Model(full, full_params), hidden)
    is_drafted = np.isin(np.arange(23), VOCABULARY)
    restricted = jnp.where(is_drafted, full_logits[:, 1:], -jnp.inf)

    bound = Model(config, params)
    logits = head_logits(bound, hidden)
    np.testing.assert_allclose(logits[:, 0], full_logits[:, 0], atol=1e-5)
    np.testing.assert_allclose(logits[:, 1:], restricted, atol=1e-5)

    tokens, log_probs, entropies = block_candidates(bound, hidden, 4, 5)
    want = jax.nn.log_softmax(restricted)
    best_tokens = np.argsort(-np.asarray(want), axis=-1)[..., :5]
    np.testing.assert_array_equal(tokens, best_tokens)
    np.testing.assert_allclose(
        log_probs, np.take_along_axis(np.asarray(want), best_tokens, -1), atol=1e-5
    )
    probs = np.exp(np.asarray(want))
    want_entropy = -np.sum(probs * np.where(is_drafted, want, 0), -1)
    np.testing.assert_allclose(entropies, want_entropy, atol=1e-5)
    # Head 1, which verifies, uses the full vocabulary.
    np.testing.assert_array_equal(
        bound.next_token_logits(hidden),
        Model(full, full_params).next_token_logits(hidden),
    )


@pytest.mark.parametrize("name", HEADS)
def test_single_levels_equal_all_levels(name):
    config, params = model(name)
    bound, hidden = Model(config, params), states()
    logits = head_logits(bound, hidden)
    ids = params["heads"].get("vocabulary", jnp.arange(23))
    tokens, log_probs, _ = block_candidates(bound, hidden, 3, 2)
    assert tokens.shape == (5, 2, 2)
    assert set(np.unique(tokens)) <= set(np.asarray(ids).tolist())
    want = jax.nn.log_softmax(logits[:, 1:3])
    np.testing.assert_allclose(log_probs, jax.lax.top_k(want, 2)[0], atol=1e-5)
    for level in (1, 2, 3):
        level_logits = bound.draft_logits(hidden, level)
        jitted = jax.jit(Model.draft_logits)(bound, hidden, jnp.int32(level))
        np.testing.assert_allclose(level_logits, jitted, atol=1e-5)
        assert level_logits.shape == (5, len(ids))
    has_own_softmax = "own" in name
    first, second = (bound.draft_logits(hidden, n) for n in (1, 2))
    assert bool(jnp.allclose(first, second)) != has_own_softmax


@pytest.mark.parametrize("name", HEADS)
def test_decoding_reads_only_a_shared_draft_softmax_in_bfloat16(name):
    config, params = model(name)
    fields = {"model": Model(config, params)}
    loaded = LanguageModel("model", None, tokenizer=None, end_tokens=(0,), **fields)
    prepared = loaded.for_decoding()
    on_cpu = jax.default_backend() == "cpu"
    shared = not HEADS[name].own_softmax
    assert (SOFTMAX in prepared.params["heads"]) == (on_cpu and shared)
    for level in (None, 1, 3):
        hidden = states() if level else jnp.stack([states()] * 3, axis=1)
        want, got = (
            each.draft_logits(hidden, level) for each in (loaded.model, prepared.model)
        )
        scale = 1 if shared else 0
        np.testing.assert_allclose(got, want, atol=scale * 2e-2 + 1e-6)


@pytest.mark.parametrize("kind", [*HEADS.values(), BlockHeadsConfig(4, 8)])
def test_new_heads_predict_like_the_model(kind):
    base = BlockwiseConfig(TRUNK)
    params = random_params(parameter_shapes(base), 0.3, 0)
    ids = VOCABULARY if kind.draft_vocabulary else None
    heads = init_heads(base, params, kind, jax.random.key(0), ids)
    config = BlockwiseConfig(TRUNK, kind)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), heads)
    assert shapes == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), parameter_shapes(config)["heads"]
    )
    params = {**params, "heads": heads}
    logits = head_logits(Model(config, params), states())
    chosen = logits[..., VOCABULARY]
    np.testing.assert_allclose(
        chosen, jnp.broadcast_to(chosen[:, :1], chosen.shape), atol=1e-5
    )


def test_conditioned_heads_draft_from_the_anchor_and_layers():
    """The candidates of one call are the logits at that position of the whole text."""
    trunk = TransformerConfig(17, 2, 8, 12, 2, max_length=16)
    heads = BlockHeadsConfig(3, 6, reads_anchor=True, feature_layers=(1, 0))
    config = BlockwiseConfig(trunk, heads)
    params = random_params(parameter_shapes(config), 0.5, 0)
    assert params["heads"]["kernel_condition"].shape == (24, 8)
    tokens, positions = jnp.array([[3, 9, 1, 4]]), jnp.arange(4)[None]
    mask = causal_mask(jnp.ones((1, 4), int))
    apply = functools.partial(BlockwiseLM(config).apply, method="all_logits")
    logits = jax.jit(apply)({"params": params}, tokens, positions, mask)
    bound = Model(config, params)
    forward = functools.partial(Model.forward, layers=heads.feature_layers)
    hidden, _, features = jax.jit(forward)(bound, tokens, positions, mask)
    anchors = bound.greedy_tokens(hidden[:, 2])
    candidates, log_probs, _ = block_candidates(
        bound, hidden[:, 2], 3, 17, anchors, features[:, 2]
    )
    expected = np.asarray(jax.nn.log_softmax(logits[:, 2, 1:]))
    np.testing.assert_allclose(
        log_probs, np.take_along_axis(expected, np.asarray(candidates), -1), rtol=1e-3
    )
    other_candidates = block_candidates(
        bound, hidden[:, 2], 3, 17, anchors + 1, features[:, 2]
    )
    assert not np.array_equal(other_candidates[0], candidates)
    with pytest.raises(UserError, match="certain token"):
        bound.block_candidates(hidden[:, 2], 3, 17)
