"""Layers with a sliding window, over whole texts and beyond the window of a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.attention import causal_mask
from bpd_jax.models.cache import commit
from bpd_jax.models.model import Model
from bpd_jax.models.rotary import RotaryConfig
from tests.decoding.random_models import make_model

WINDOW = 6


@jax.jit
def read(model, *arguments):
    """Logits of a pass, and the keys and values."""
    hidden, new, _ = model.forward(*arguments)
    return model.next_token_logits(hidden), new


def whole(model, tokens, window=None):
    """Logits of a pass over whole texts, with a mask made by hand."""
    positions = jnp.arange(tokens.shape[1])
    mask = causal_mask(jnp.ones_like(tokens))
    if window is not None:
        mask &= positions[:, None] - positions < window
    return read(model, tokens, positions[None], mask)


@pytest.mark.parametrize("layers", [None, (1,)])
def test_windows_hold_in_whole_texts_and_with_the_cache(layers):
    sizes = {"num_layers": 2, "max_length": 64, "rotary": RotaryConfig()}
    model = make_model(3, 4, 14, window=WINDOW, windowed_layers=layers, **sizes)
    trunk = dataclasses.replace(model.config.trunk, window=None)
    plain = Model(dataclasses.replace(model.config, trunk=trunk), model.params)
    text = jnp.asarray(np.random.default_rng(0).integers(1, 14, (1, 20)), jnp.int32)
    want, new = whole(model, text)
    unlimited, _ = whole(plain, text)
    if layers is None:
        by_hand, _ = whole(plain, text, WINDOW)
        np.testing.assert_allclose(want, by_hand, atol=1e-5)
    # Within one window nothing changes; beyond it something does.
    np.testing.assert_allclose(want[:, :WINDOW], unlimited[:, :WINDOW], atol=1e-5)
    assert abs(want[:, -1] - unlimited[:, -1]).max() > 1e-4

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
