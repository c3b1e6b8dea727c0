"""The block drafter: dependencies of its states, and its cache against whole texts.

`tests/formats/drafter_conversion_test.py` compares it with its authors' code.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.block_drafter import with_confidence, with_softmax
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import random_params

TARGET = TransformerConfig(
    vocab_size=23,
    num_layers=4,
    d_model=12,
    d_ff=20,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    max_length=64,
    rotary=RotaryConfig(100.0),
    norm_epsilon=1e-3,
)
CONFIG = BlockDrafterConfig(
    feature_layers=(0, 2),
    block_size=4,
    num_heads=4,
    num_kv_heads=2,
    window=6,
    draft_vocabulary=9,
)
VOCABULARY = np.array([1, 2, 5, 6, 8, 13, 17, 20, 22])


@functools.cache
def drafter(**changes):
    """Functions and random parameters."""
    config = dataclasses.replace(CONFIG, **changes)
    functions = DrafterFunctions(config, TARGET)
    shapes = jax.eval_shape(functions.init, jax.random.key(0))
    params = random_params(shapes, 0.5, 3)
    softmax = random_params(jax.ShapeDtypeStruct((23, 12), jnp.float32), 1, 4)
    vocabulary = None if config.draft_vocabulary is None else VOCABULARY
    return functions, with_softmax(params, softmax, vocabulary)


@functools.partial(jax.jit, static_argnums=(0, 1))
def states_after(functions, length, params, features, lengths, anchors):
    """States of one block after texts of these lengths."""
    cache = functions.prefill(params, features, lengths, length)
    return functions.states(params, cache, anchors)


def texts(lengths, seed=0, width=24):
    rng = np.random.default_rng(seed)
    longest = max(lengths) + 1
    features = rng.normal(0, 1, (len(lengths), longest, width)).astype(np.float32)
    return jnp.asarray(features), jnp.asarray(lengths, jnp.int32)


def anchors_of(batch, seed=5):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(0, 1, (batch, 12)), jnp.float32)


@pytest.mark.parametrize("window, seed", [(4, 0), (6, 1), (None, 2)])
def test_appended_tokens_equal_a_prefilled_text(window, seed):
    """Random prompts and numbers of accepted tokens, 0 included."""
    functions, params = drafter(window=window, reads_last_token=True)
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, CONFIG.block_size + 1, (5, 4))
    prompts = rng.integers(1, 9, 5)
    lengths = prompts + counts.sum(1)
    features, _ = texts([40] * 5, seed)
    prefill = jax.jit(functions.prefill, static_argnums=3)
    append_features = jax.jit(functions.append)
    # Features after the prompt are padding, which is not cached.
    cache = prefill(params, features[:, :9], jnp.asarray(prompts), 32)
    for call in range(4):
        positions = np.asarray(cache.lengths)[:, None] + np.arange(CONFIG.block_size)
        new = jnp.take_along_axis(features, positions[..., None], axis=1)
        cache = append_features(params, cache, new, jnp.asarray(counts[:, call]))
    np.testing.assert_array_equal(cache.lengths, lengths)
    last = jnp.take_along_axis(features, jnp.asarray(lengths)[:, None, None] - 1, 1)
    np.testing.assert_array_equal(cache.last, last[:, 0])
    expected = prefill(params, features, jnp.asarray(lengths), 32).context
    visible = np.minimum(lengths, expected.slots)

    def seen(context, row):
        keys = [array[row, ..., : visible[row]] for array in context.keys]
        return keys, [array[row, :, : visible[row]] for array in context.values]

    assert_close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    for row in range(5):
        jax.tree.map(assert_close, seen(cache.context, row), seen(expected, row))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": None, "guess_at_anchor": False},
        {"reads_last_token": True},
        {"moving_window": True, "convolution_taps": 3, "convolution_group": 4},
    ],
    ids=str,
)
def test_teacher_forcing_equals_decoding(changes):
    """All anchors of a text at once, also in a span from its middle."""
    functions, params = drafter(**changes)
    features, _ = texts([20, 20])
    # The second row begins at position 7, and its anchors see 6 tokens back at most.
    offsets = jnp.array([0, 7 if functions.config.window else 0])
    indices = jnp.array([[1, 3, 9], [6, 11, 12]])
    anchors = anchors_of(6).reshape(2, 3, 12)
    pieces = jnp.stack([features[b, o : o + 13] for b, o in enumerate(offsets)])
    teacher_forced = jax.jit(functions.teacher_forced_states)
    positions = offsets[:, None] + jnp.arange(13)
    states = teacher_forced(params, pieces, positions, anchors, indices)
    for block in range(3):
        lengths = offsets + indices[:, block]
        anchor = anchors[:, block]
        expected = states_after(functions, 24, params, features, lengths, anchor)
        np.testing.assert_allclose(states[:, block], expected, rtol=1e-3, atol=1e-4)


def test_candidates_are_the_best_tokens_of_the_draft_vocabulary():
    functions, params = drafter()
    features, lengths = texts([3, 8])
    anchors = anchors_of(2)
    cache = jax.jit(functions.prefill, static_argnums=3)(params, features, lengths, 16)
    candidates = jax.jit(functions.candidates, static_argnums=(3, 4))
    tokens, log_probs, entropies, _ = candidates(params, cache, anchors, 3, 9)
    assert tokens.shape == log_probs.shape == (2, 3, 9)
    states = states_after(functions, 16, params, features, lengths, anchors)
    logits = states @ params["softmax"].T
    expected = jax.nn.log_softmax(logits)
    order = np.argsort(-expected, axis=-1)
    np.testing.assert_array_equal(tokens, VOCABULARY[order])
    np.testing.assert_allclose(
        log_probs, np.take_along_axis(np.asarray(expected), order, -1), rtol=1e-4
    )
    entropy = -np.sum(np.exp(expected) * expected, -1)
    np.testing.assert_allclose(entropies, entropy, rtol=1e-4)


def test_confidence_is_the_probability_of_the_first_candidate():
    """Position by position, with the ratios of the others, unless the order changes."""
    functions, params = drafter(confidence=True)
    plain, _ = drafter()
    rng = np.random.default_rng(5)
    states = jnp.asarray(rng.normal(size=(200, 3, 12)), jnp.float32)
    tokens, log_probs, _ = plain.best(params, states, 3)
    same, found, _ = functions.best(params, states, 3)
    np.testing.assert_array_equal(same, tokens)
    predicted = jax.nn.sigmoid(functions.confidence_logits(params, states))
    old, new = np.exp(np.float64(log_probs)), np.exp(np.float64(found))
    share = (1 - predicted) / (1 - old[..., 0])
    keeps = predicted > share * old[..., 1] * 1.001
    assert 0 < keeps.sum() < keeps.size
    np.testing.assert_allclose(new[..., 0][keeps], predicted[keeps], rtol=1e-3)
    expected = old[..., 1:] * share[..., None]
    np.testing.assert_allclose(new[..., 1:][keeps], expected[keeps], rtol=2e-3)
    # Elsewhere the first two are equal; nowhere is the second above the first.
    np.testing.assert_allclose(new[..., 0][~keeps], new[..., 1][~keeps], rtol=1e-3)
    assert (found[..., 0] >= found[..., 1]).all()


def test_confidence_does_not_change_candidates_that_a_markov_head_corrects():
    functions, params = drafter(markov_rank=3, confidence=True)
    plain, _ = drafter(markov_rank=3)
    for found, expected in zip(
        functions.best(params, anchors_of(2), 3),
        plain.best(params, anchors_of(2), 3),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)


def test_extreme_confidences_are_finite():
    log_probs = jnp.log(jnp.array([[1.0, 1e-30], [0.6, 0.4]]))
    found = with_confidence(log_probs, jnp.array([-1e4, 1e4]))
    assert np.isfinite(found[:, 0]).all()
    assert (found[:, 0] >= found[:, 1]).all()


@pytest.mark.parametrize(("window", "moving"), [(None, False), (4, False), (4, True)])
def test_blocks_see_the_last_tokens_of_their_text_before_the_anchor(window, moving):
    """Against loops over blocks, queries and tokens."""
    functions, _ = drafter(window=window, moving_window=moving)
    anchors = np.array([[1, 5, 9, 10], [2, 3, 7, 8]])
    segments = np.array([[1] * 6 + [2] * 4, [1] * 2 + [2] * 3 + [3] * 5])
    for ids in (None, segments):
        found = functions._visible(
            jnp.asarray(anchors), None if ids is None else jnp.asarray(ids), 10
        )
        for row, block, query in np.ndindex(2, 4, functions.config.queries):
            anchor = anchors[row, block]
            first = 0 if window is None else anchor - window
            if moving:
                first = anchor + query - window + 1
            seen = [
                token
                for token in range(10)
                if first <= token < anchor
                and (ids is None or ids[row][token] == ids[row][anchor - 1])
            ]
            assert np.flatnonzero(found[row, block, query]).tolist() == seen
