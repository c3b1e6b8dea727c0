"""Weights of heads, computed by hand."""

import numpy as np
import pytest

from bpd_jax.training.head_schedule import HeadSchedule

ONES = (1.0, 1.0, 1.0)


def weights_at(schedule: HeadSchedule, step: int, base=ONES) -> list[float]:
    weights = schedule.weights(schedule.start(), step, base)
    assert weights.dtype == np.float32
    return weights.tolist()


# The weights of the heads after the first one.
@pytest.mark.parametrize(
    "schedule, base, table",
    [
        (
            # The example of the docstring.
            HeadSchedule(decay=0.5, ramp_steps=50, add_every=100),
            ONES,
            {
                100: [0, 0],
                101: [0.01, 0],
                150: [0.5, 0],
                200: [0.5, 0],
                201: [0.5, 0.005],
                300: [0.5, 0.25],
            },
        ),
        (
            HeadSchedule(ramp_steps=2, add_every=10, waiting=0.2),
            (1.0, 1.0),
            {1: [0.2], 10: [0.2], 11: [0.6], 12: [1.0], 13: [1.0]},
        ),
    ],
    ids=["docstring", "waiting"],
)
def test_weights_of_a_schedule(schedule, base, table):
    weights = np.array([weights_at(schedule, step, base) for step in table])
    assert set(weights[:, 0]) == {base[0]}
    np.testing.assert_allclose(weights[:, 1:], list(table.values()), rtol=1e-6)


def test_no_head_is_added_before_the_schedule_begins():
    later = {"ramp_steps": 2, "start_after": 7, "waiting": 0.2}
    together = HeadSchedule(**later)
    steps = range(1, 14)
    weights = [weights_at(together, step)[1:] for step in steps]
    assert weights == [[w, w] for w in np.float32([*[0.2] * 7, 0.6, *[1.0] * 5])]
    # The same as without the steps before, later.
    in_order = HeadSchedule(**later, add_every=3)
    at_once = HeadSchedule(ramp_steps=2, waiting=0.2, add_every=3)
    for step in steps:
        assert weights_at(in_order, step + 7) == weights_at(at_once, step)
    by_entropy = HeadSchedule(**later, add_every=3, order="entropy")
    evaluations = {step: [0.0, 2.0, 1.0] for step in steps}
    state, _ = run(by_entropy, evaluations, 13, 3)
    assert state["added"] == [[3, 10], [2, 13]]


def run(schedule, evaluations, steps, heads):
    """Every step's weights, as the trainer asks for them."""
    state, table = schedule.start(), []
    for step in range(1, steps + 1):
        table.append(schedule.weights(state, step, (1.0,) * heads).tolist())
        state = schedule.advance(state, step, evaluations.get(step))
    return state, table


def test_head_of_lowest_entropy_is_added_first():
    schedule = HeadSchedule(add_every=4, order="entropy", waiting=0.25)
    evaluations = {
        2: [9.0, 9.0, 1.0, 5.0],  # an older evaluation, replaced before it is used
        3: [0.1, 3.0, 4.0, 2.0],  # so head 4 is added after step 4,
        6: [0.1, 3.0, 1.0, 0.5],  # then head 3,
        9: [0.1, 0.0, 0.0, 0.0],  # and the one that is left
    }
    state, table = run(schedule, evaluations, 14, 4)
    assert state["added"] == [[4, 4], [3, 8], [2, 12]]
    w = 0.25
    assert table[3] == [1.0, w, w, w]
    assert table[4] == table[7] == [1.0, w, w, 1.0]
    assert table[8] == table[11] == [1.0, w, 1.0, 1.0]
    assert table[12] == [1.0, 1.0, 1.0, 1.0]


def test_an_addition_waits_for_the_first_evaluation():
    schedule = HeadSchedule(add_every=2, order="entropy", waiting=0.5)
    state, _ = run(schedule, {5: [0.0, 2.0, 1.0]}, 7, 3)
    # Two heads were due by step 5.
    assert state["added"] == [[3, 5], [2, 5]]
