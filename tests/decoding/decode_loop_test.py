"""The device loop against a Python loop, its memory, and its sharding."""

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.decode_loop import (
    Weights,
    decode_on_device,
    decode_with_host,
    prefill,
)
from bpd_jax.decoding.options import StepOptions
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.models.model import Model
from tests.decoding.random_models import make_model

OPTIONS = StepOptions(end_of_text=0)
DRAFTER = PathDrafter(Paths(HeadsSource(4, 4)), ExactBest(3))


WEIGHTS = Weights(DRAFTER.arrays)


def start(model, rows=4, sharding=None):
    rng = np.random.default_rng(7)
    lengths = np.array([6, 2, 8, 1, 7, 3, 5, 4])[:rows]
    prompts = rng.integers(1, 13, (rows, 8)).astype(np.int32)
    arrays = [prompts, lengths, lengths + np.array([12, 5, 0, 9] * 2)[:rows]]
    arrays = [jax.device_put(jnp.asarray(a, jnp.int32), sharding) for a in arrays]
    keys = 0, jnp.arange(rows)
    return prefill(
        model,
        WEIGHTS,
        DRAFTER,
        *arrays,
        keys,
        options=OPTIONS,
        max_calls=12,
    )


def visible(state):
    """The parts of a state that matter, without padding, as numpy arrays."""
    lengths = np.asarray(state.lengths)
    history = jax.device_get(state.history)
    calls = np.asarray(state.calls)
    return [
        (
            np.asarray(state.tokens)[row, : lengths[row]].tolist(),
            history.accepted[: calls[row], row].tolist(),
            history.drafts[: calls[row], row].tolist(),
            history.ranks[: calls[row], row].tolist(),
            np.asarray(state.cache.values)[:, row, :, : lengths[row]],
        )
        for row in range(len(lengths))
    ]


def assert_same(a, b, atol=0.0):
    for x, y in zip(visible(a), visible(b), strict=True):
        assert x[:4] == y[:4]
        np.testing.assert_allclose(x[4], y[4], atol=atol)


def test_device_loop_equals_the_python_loop():
    model = make_model(0)
    state = start(model)
    device = decode_on_device(model, WEIGHTS, DRAFTER, state, OPTIONS)
    state = start(model)
    python = decode_with_host(model, WEIGHTS, DRAFTER, state, OPTIONS)
    assert_same(device, python, atol=1e-5)
    assert device.calls.tolist() == python.calls.tolist()


def test_cache_always_holds_the_keys_of_the_text():
    """The cache after block decoding equals that of one pass over the text."""
    model = make_model(1)
    final = decode_on_device(model, WEIGHTS, DRAFTER, start(model), OPTIONS)
    # A row that is finished from the beginning does not change.
    assert (final.calls[2], final.lengths[2]) == (0, 8)
    for row, (text, *_, values) in enumerate(visible(final)):
        tokens = jnp.asarray([text])
        mask = jnp.tril(jnp.ones((1, len(text), len(text)), bool))
        positions = jnp.arange(len(text))[None]
        _, new, _ = jax.jit(Model.forward)(model, tokens, positions, mask)
        np.testing.assert_allclose(
            values, new.values[:, 0].swapaxes(1, 2), atol=1e-4, err_msg=str(row)
        )


def test_loop_donates_its_state_and_never_leaves_the_device():
    model = make_model(0)
    state = start(model)
    compiled = decode_on_device.lower(model, WEIGHTS, DRAFTER, state, OPTIONS).compile()
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
    assert "callback" not in compiled.as_text()
    with jax.transfer_guard("disallow"):
        final = decode_on_device(model, WEIGHTS, DRAFTER, state, OPTIONS)
        jax.block_until_ready(final)
    assert final.done.all()
