"""The block drafter: dependencies of its states, and its cache against whole texts.

`tests/pretrained/drafter_conversion_test.py` compares it with its authors' code.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.cache import KeyValues
from bpd_jax.models.context_cache import append, cache_of_slots, slot_positions
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions, markov_refiner
from bpd_jax.models.drafter_outputs import with_confidence, with_softmax
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.trained_refiners import markov_scores
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


def test_states_depend_on_the_tokens_of_the_window_alone():
    functions, params = drafter(window=6)
    features, lengths = texts([3, 11])
    anchors = anchors_of(2)
    states = states_after(functions, 16, params, features, lengths, anchors)
    # Not on padding, and not on the first five of eleven tokens.
    changed = features.at[0, 3:].add(1).at[1, :5].add(1)
    same = states_after(functions, 16, params, changed, lengths, anchors)
    np.testing.assert_array_equal(same, states)
    changed = features.at[:, 2].add(1).at[1, 5].add(1)
    other = states_after(functions, 16, params, changed, lengths, anchors)
    assert (np.abs(other - states).max((1, 2)) > 1e-3).all()


def test_last_token_is_read_by_a_linear_function_of_normalised_states():
    functions, params = drafter(reads_last_token=True)
    features, lengths = texts([3, 8])
    anchors, last = anchors_of(2), features[:, 2]
    bound = functions.module.bind({"params": params})
    added = bound._condition(anchors[:, None], last[:, None])[:, 0]
    parts = np.split(np.concatenate([last, anchors], -1), 3, axis=-1)
    parts = [x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-3) for x in parts]
    expected = np.concatenate(parts, -1) @ params["query_condition"]["kernel"]
    np.testing.assert_allclose(added, expected, rtol=1e-4, atol=1e-5)
    # Without it the drafter is one that does not read the last token.
    plain_functions, _ = drafter()
    rest = {name: x for name, x in params.items() if name != "query_condition"}
    plain = states_after(plain_functions, 16, rest, features, lengths, anchors)
    zeros = {**rest, "query_condition": {"kernel": jnp.zeros((36, 36))}}
    states = states_after(functions, 16, zeros, features, lengths, anchors)
    np.testing.assert_allclose(states, plain, rtol=1e-5, atol=1e-5)


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
    context = cache.context
    visible = np.minimum(lengths, context.slots)
    for row in range(5):
        for appended, prefilled in zip(context.keys, expected.keys, strict=True):
            np.testing.assert_allclose(
                appended[row, ..., : visible[row]],
                prefilled[row, ..., : visible[row]],
                atol=1e-5,
            )
        for appended, prefilled in zip(context.values, expected.values, strict=True):
            np.testing.assert_allclose(
                appended[row, :, : visible[row]],
                prefilled[row, :, : visible[row]],
                atol=1e-5,
            )


@pytest.mark.parametrize("slots", [3, 5])
def test_cache_holds_the_last_tokens_of_every_row(slots):
    """Against lists: token n of row r has the key 100 r + n."""
    rng = np.random.default_rng(2)
    lengths, kept = np.zeros(3, int), [[], [], []]
    empty = jnp.zeros((1, 3, slots, 1, 1))
    cache = cache_of_slots(KeyValues(empty, empty), jnp.zeros(3, int))
    append_tokens = jax.jit(append)
    for _ in range(12):
        counts = rng.integers(0, 5, 3)
        token_keys = 100 * np.arange(3)[:, None] + lengths[:, None] + np.arange(4) + 1.0
        new = jnp.asarray(token_keys)[None, :, :, None, None]
        cache = append_tokens(cache, KeyValues(new, -new), jnp.asarray(counts))
        for row in range(3):
            kept[row] += token_keys[row, : counts[row]].tolist()
        lengths += counts
        positions = np.asarray(slot_positions(cache.lengths, slots))
        for row in range(3):
            num_kept = min(len(kept[row]), slots)
            slot_keys = np.asarray(cache.keys[0][row, 0, 0, :num_kept])
            assert sorted(slot_keys) == sorted(kept[row][-slots:])
            expected = [kept[row][position] for position in positions[row, :num_kept]]
            assert slot_keys.tolist() == expected
            np.testing.assert_array_equal(
                cache.values[0][row, 0, :num_kept, 0], -slot_keys
            )


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
    candidates = jax.jit(functions.candidates, static_argnums=3)
    tokens, log_probs, entropies, _ = candidates(params, cache, anchors, 9)
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


def test_the_markov_head_is_a_refiner():
    functions, params = drafter(markov_rank=3)
    config, refiner = markov_refiner(functions, params)
    assert config.level_scale is False
    tokens = jnp.asarray(VOCABULARY)[None, None]
    scores = markov_scores(refiner, jnp.array([[7]]), tokens, 2)
    head = params["markov"]
    expected = head["output"] @ head["embedding"][7]
    np.testing.assert_allclose(scores[0, 0], expected, rtol=1e-5)
    with pytest.raises(UserError, match="no Markov head"):
        markov_refiner(*drafter())


@pytest.mark.parametrize("reads_markov", [False, True])
def test_confidences_are_a_logistic_regression(reads_markov):
    functions, params = drafter(
        markov_rank=3, confidence=True, confidence_reads_markov=reads_markov
    )
    states, previous = anchors_of(2), jnp.array([4, 9])
    found = functions.confidence_logits(params, states, previous)
    inputs = np.asarray(states)
    if reads_markov:
        inputs = np.concatenate([inputs, params["markov"]["embedding"][previous]], -1)
    weights = params["confidence"]
    logits = inputs @ weights["kernel"][:, 0] + weights["bias"][0]
    np.testing.assert_allclose(found, logits, rtol=1e-4)


def test_confidence_is_the_probability_of_the_first_candidate():
    """Position by position, with the ratios of the others, unless the order changes."""
    functions, params = drafter(confidence=True)
    plain = dataclasses.replace(
        functions, config=dataclasses.replace(functions.config, confidence=False)
    )
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
    plain = dataclasses.replace(
        functions, config=dataclasses.replace(functions.config, confidence=False)
    )
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
