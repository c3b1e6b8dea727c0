"""The cache of a small LM after many calls equals that of one pass over the text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.drafting import small_lm
from bpd_jax.drafting.interface import Extension
from bpd_jax.drafting.small_lm import SmallLM
from tests.drafting.naive import (
    make_model,
    make_view,
    slow_read,
    slow_values,
    whole_text,
)

REACH = 4


@pytest.fixture(scope="module")
def model():
    return make_model(3, num_layers=2)


@pytest.fixture(scope="module")
def assert_read(model):
    """Checks the values of a text in a row of a cache."""

    def check(cache, row, text, length=None):
        assert int(np.asarray(cache.lengths)[row]) == (length or len(text))
        layers = jax.device_get(cache.values)
        values = np.stack([layer[row, :, : len(text)] for layer in layers])
        np.testing.assert_allclose(values, slow_values(model, text), atol=1e-5)

    return check


def test_prompts_are_read_in_pieces(model, assert_read, monkeypatch):
    view = make_view(model, lengths=(5, 1, 17, 8), slots=20)
    for chunk in (4, 128):
        monkeypatch.setattr(small_lm, "_CHUNK", chunk)
        reader = SmallLM(model.sizes, REACH)
        cache = jax.jit(reader.prefill)(model.params, view.tokens, view.lengths)
        for row, length in enumerate(view.lengths.tolist()):
            assert_read(cache, row, np.asarray(view.tokens)[row, :length].tolist())


def test_cache_follows_rows_that_accept_different_counts(model, assert_read):
    """Rows accept 1 … 4 tokens per call; the last one is finished after its first."""
    params = model.params
    reader = SmallLM(model.sizes, REACH)
    # The last row ends without a free slot.
    view = make_view(model, lengths=(5, 1, 9, 15), slots=22)
    accepted = np.array([[1, 4, 2, 3], [4, 1, 3, 0], [1, 1, 4, 0], [4, 4, 1, 0]])

    @jax.jit
    def look(cache, tokens, lengths, next_token):
        seen = dataclasses.replace(
            view, tokens=tokens, lengths=lengths, next_token=next_token
        )
        reading = reader.start(params, cache, seen)
        logits = reader.logits(params, reading.hidden[:, 0])
        return reading.cache, jax.nn.log_softmax(logits)

    cache = jax.jit(reader.prefill)(params, view.tokens, view.lengths)
    for call, counts in enumerate([*accepted, [0] * 4]):
        cache, scores = look(cache, view.tokens, view.lengths, view.next_token)
        scores = np.asarray(scores)
        for row in range(4):
            text = whole_text(view, row)
            if call > 1 and row == 3:
                assert_read(cache, row, text[:-1], len(text))
                continue
            assert_read(cache, row, text)
            want = slow_read(model, text)
            np.testing.assert_allclose(scores[row], want, atol=1e-4)
        # Accepted tokens begin with the certain one; the others are already in place.
        tokens, lengths = np.array(view.tokens), np.array(view.lengths)
        active = np.flatnonzero(counts)
        tokens[active, lengths[active]] = view.next_token[active]
        lengths += counts
        following = np.where(counts, tokens[np.arange(4), lengths], view.next_token)
        view = dataclasses.replace(
            view,
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(lengths),
            next_token=jnp.asarray(following),
        )


def test_paths_attend_to_the_text_and_their_own_tokens(model):
    """Three levels of a tree whose paths branch, end and are reordered."""
    params = model.params
    view = make_view(model)
    reader = SmallLM(model.sizes, REACH)
    steps = [
        ([[0, 0, 0]] * 3, [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        ([[2, 0, 2, 2]] * 3, [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]),
        ([[3, 1]] * 3, [[5, 5], [6, 6], [7, 7]]),
    ]
    extend = jax.jit(reader.extend, static_argnames="level")
    scores_of = jax.jit(reader.scores)

    @jax.jit
    def start():
        cache = reader.prefill(params, view.tokens, view.lengths)
        return reader.start(params, cache, view)

    reading = start()
    paths = [[()], [()], [()]]
    for level, (parents, tokens) in enumerate(steps, start=1):
        parents, tokens = np.array(parents), np.array(tokens)
        extension = Extension(parents, np.zeros_like(parents), tokens)
        reading = extend(params, reading, level=level, extension=extension)
        offered = np.broadcast_to(np.arange(13), (*tokens.shape, 13))
        scores = np.asarray(scores_of(params, reading.hidden, offered))
        for row in range(3):
            paths[row] = [
                (*paths[row][parent], token)
                for parent, token in zip(
                    parents[row].tolist(), tokens[row].tolist(), strict=True
                )
            ]
            for index, path in enumerate(paths[row]):
                want = slow_read(model, [*whole_text(view, row), *path])
                np.testing.assert_allclose(scores[row, index], want, atol=1e-4)


@pytest.mark.parametrize("rows", [9, 17])
def test_rows_without_a_token_are_never_chosen(model, rows):
    size = model.config.trunk.vocab_size
    padded = SmallLM(model.sizes, REACH, vocab_size=rows)
    hidden = jax.random.normal(jax.random.key(0), (2, model.config.trunk.d_model))
    logits = padded.logits(model.params, hidden)
    assert logits.shape == (2, rows)
    plain, shared = model.next_token_logits(hidden), min(rows, size)
    np.testing.assert_array_equal(logits[:, :shared], plain[:, :shared])
    assert (np.asarray(logits[:, shared:]) < -1e8).all()
    # A token that the small LM does not have is read as its last one.
    tokens = jnp.array([[1, max(rows, size) - 1]])
    known = jnp.minimum(tokens, size - 1)
    cache = model.empty_cache(1, 8)
    got, _ = padded._pass(model.params, tokens, cache)
    want, _ = SmallLM(model.sizes, REACH)._pass(model.params, known, cache)
    np.testing.assert_array_equal(got, want)
