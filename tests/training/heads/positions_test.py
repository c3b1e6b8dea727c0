import numpy as np
import pytest

from bpd_jax.data.generations import Generations
from bpd_jax.training.heads.positions import epoch_order, positions_of, split_texts

# a b|c d e, f|g, h| (empty answer), |i j k: | ends the prompt.
TEXTS = Generations(
    folder=None,
    tokens=np.arange(11, dtype=np.int32),
    offsets=np.array([0, 5, 7, 8, 11]),
    prompt_lengths=np.array([2, 1, 1, 0]),
    base="",
    vocab_size=11,
    facts={},
)
A, B, C, D, E, F, G, H, I, J, K = range(11)


def test_worked_example():
    positions = positions_of(TEXTS, include_prompts=False)
    assert positions.tokens[positions.places].tolist() == [B, C, D, F, I, J]
    assert positions.rows.tolist() == [0, 0, 0, 1, 3, 3]
    assert positions.starts.tolist() == [0, 3, 4, 4, 6]
    tokens, valid = positions.after(np.arange(6), 3)
    assert [t[v].tolist() for t, v in zip(tokens, valid, strict=True)] == [
        [C, D, E],
        [D, E],
        [E],
        [G],
        [J, K],
        [K],
    ]


def test_prompts_can_be_included():
    positions = positions_of(TEXTS, include_prompts=True)
    assert positions.tokens[positions.places].tolist() == [A, B, C, D, F, I, J]
    assert positions.after(np.array([0]), 2)[0].tolist() == [[B, C]]


def test_split_is_by_text_and_repeatable():
    positions = positions_of(TEXTS, include_prompts=False)
    train, held_out = split_texts(positions, 0.25, 100, seed=3)
    assert not set(positions.rows[train]) & set(positions.rows[held_out])
    assert sorted([*train, *held_out]) == list(range(6))
    repeated = split_texts(positions, 0.25, 100, seed=3)
    np.testing.assert_array_equal(repeated[1], held_out)
    limited = split_texts(positions, 0.9, 2, seed=3)[1]
    assert len(limited) == 2


@pytest.mark.parametrize("count", [1, 255, 40_000])
def test_an_epoch_visits_every_position_once(count):
    order = epoch_order(count, 7, 0)
    assert sorted(order.tolist()) == list(range(count))
    if count > 1:
        assert order.tolist() != epoch_order(count, 7, 1).tolist()
        assert order.tolist() == epoch_order(count, 7, 0).tolist()
