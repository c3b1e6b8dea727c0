"""Anchors in texts: every position once per epoch, and the context of their blocks."""

import dataclasses

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.training.heads.drafter_batches import BlockBatcher
from bpd_jax.training.heads.positions import positions_of
from bpd_jax.training.heads.states_cache import States


@pytest.fixture
def source(texts):
    """States that identify their position: text number, position in the text, token."""
    positions = positions_of(texts, True)
    text_positions = positions.places - positions.offsets[positions.rows]
    states = np.stack(
        [positions.rows, text_positions, positions.tokens[positions.places]], 1
    )
    return BlockBatcher(
        States(positions, states.astype(np.float32)),
        positions_of(texts, False),
        block_size=4,
        anchors=6,
        rows=5,
        window=4,
        row_tokens=64,
    )


@pytest.mark.parametrize("row_tokens", [64, 16])
def test_an_epoch_uses_every_position_once(source, row_tokens):
    source = dataclasses.replace(source, row_tokens=row_tokens)
    indices = np.arange(len(source.positions))[::3]
    for seed in range(3):
        groups = source.epoch(indices, np.random.default_rng(seed))
        used = groups.positions[groups.positions >= 0]
        assert sorted(used) == indices.tolist()
        for positions in groups.positions:
            rows = source.positions.rows[positions[positions >= 0]]
            assert len(set(rows.tolist())) == 1


@pytest.mark.parametrize("row_tokens", [64, 16])
def test_rows_hold_the_context_of_their_anchors(texts, source, row_tokens):
    """Compared with the texts themselves, also where texts are split into spans."""
    source = dataclasses.replace(source, row_tokens=row_tokens)
    anchors = cut = 0
    batches = source.batches(np.arange(len(source.positions)), seed=0)
    for _ in range(12):
        batch = next(batches)
        assert batch.states.shape[:2] == (5, source.length)
        for row in range(5):
            text_index, offset = int(batch.states[row, 0, 0]), int(batch.offsets[row])
            text = texts[text_index]
            cut += offset > 0
            for anchor in np.flatnonzero(batch.valid[row].any(1)):
                position = int(batch.anchors[row, anchor])
                context = batch.states[row, max(0, position - source.window) : position]
                first = max(0, offset + position - source.window)
                # The window is full, except at the beginning of the text.
                assert context[:, 1].tolist() == list(range(first, offset + position))
                assert (
                    context[:, 2].tolist() == text[first : offset + position].tolist()
                )
                following = text[offset + position :][: source.block_size]
                valid = batch.valid[row, anchor]
                assert valid.tolist() == [j < len(following) for j in range(4)]
                assert batch.tokens[row, anchor][valid].tolist() == following.tolist()
                # The first possible anchor is the token after the prompt.
                assert offset + position >= texts.prompt_lengths[text_index]
                anchors += 1
    assert anchors > 100
    assert (cut > 0) == (row_tokens == 16)


def test_rows_hold_the_states_that_the_targets_are_predicted_from(source):
    """With soft targets, also at the end of a span."""
    source = dataclasses.replace(source, row_tokens=16, ahead=3)
    batches = source.batches(np.arange(len(source.positions)), seed=0)
    for _ in range(12):
        batch = next(batches)
        valid = batch.valid[..., 1:]
        places = (batch.anchors[..., None] + np.arange(3))[valid]
        rows = np.broadcast_to(np.arange(5)[:, None, None], valid.shape)[valid]
        assert places.max() < source.length
        states = batch.states[rows, places, 1]
        np.testing.assert_array_equal(states, batch.offsets[rows] + places)


def test_batches_resume_at_any_step(source):
    indices = np.arange(len(source.positions))
    batches = source.batches(indices, seed=3)
    groups = source.epoch(indices, np.random.default_rng(0))
    skipped = len(groups.starts) // source.rows + 2
    for _ in range(skipped):
        next(batches)
    resumed = source.batches(indices, seed=3, step=skipped)
    for _ in range(3):
        for resumed_array, expected_array in zip(
            next(resumed), next(batches), strict=True
        ):
            np.testing.assert_array_equal(resumed_array, expected_array)
    other_batch = next(source.batches(indices, seed=4, step=skipped))
    assert not np.array_equal(other_batch.tokens, next(batches).tokens)


@pytest.mark.parametrize("window", [None, 16])
def test_long_texts_need_a_window_that_fits(source, window):
    with pytest.raises(UserError, match="row_tokens = 16"):
        dataclasses.replace(source, row_tokens=16, window=window)
