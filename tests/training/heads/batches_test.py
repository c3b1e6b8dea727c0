import numpy as np
import pytest

from bpd_jax.training.heads.batches import Ring, ring_batches
from bpd_jax.training.heads.frozen_states import FrozenModel
from bpd_jax.training.heads.positions import positions_of

CAPACITY = 200


@pytest.fixture
def positions(texts):
    return positions_of(texts, include_prompts=False)


@pytest.fixture
def every_state(model, params, texts, positions):
    """States of all positions."""
    base = FrozenModel(model, params, 256, "float16")
    all_states = np.empty((len(positions), base.d_model), base.dtype)
    for row, states in base.states([texts[row] for row in range(len(texts))]):
        first, last = positions.starts[row], positions.starts[row + 1]
        all_states[first:last] = states[2:-1]
    return all_states


@pytest.fixture
def ring(model, params, texts, positions):
    base = FrozenModel(model, params, 256, "float16")
    rows = np.arange(10, len(texts))
    return Ring(texts, positions, rows, base, capacity=CAPACITY, group=3, seed=0)


def test_draws_are_states_of_their_positions(ring, every_state, positions):
    for _ in range(5):
        indices, states = ring.draw(50)
        np.testing.assert_allclose(
            states.astype(np.float32), every_state[indices], atol=2e-2
        )
        assert positions.rows[indices].min() >= 10
        ring.add(70)


def test_oldest_states_are_replaced_in_constant_memory(ring):
    drawn = set()
    for _ in range(60):
        drawn |= set(ring.draw(100)[0].tolist())
        ring.add(CAPACITY)
        assert len(ring._states) == CAPACITY
    # All texts are used in turn.
    assert len(drawn) > 1000


def test_states_are_drawn_the_given_number_of_times(ring, positions):
    added_before = ring.added
    source = ring_batches(ring, positions, 64, 4, uses=2.0)
    batches = [next(source) for _ in range(51)]
    # The states for the last batch have not been added yet.
    assert abs((ring.added - added_before) - 50 * 32) < 3 * 40
    assert batches[0].states.shape == (64, 24)
    assert batches[0].tokens.shape == (64, 4)
