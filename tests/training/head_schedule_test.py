"""Weights of heads, computed by hand."""

import json

import numpy as np
import pytest

from bpd_jax.errors import UserError
from bpd_jax.training.head_schedule import HeadSchedule

ONES = (1.0, 1.0, 1.0)


def weights_at(schedule: HeadSchedule, step: int, base=ONES) -> list[float]:
    found = schedule.weights(schedule.start(), step, base)
    assert found.dtype == np.float32
    return found.tolist()


def test_without_settings_nothing_changes():
    for step in (1, 1000):
        assert weights_at(HeadSchedule(), step, (1.0, 0.5, 2.0)) == [1.0, 0.5, 2.0]


def test_decays_with_the_distance():
    found = weights_at(HeadSchedule(decay=0.5), 1, (2.0, 1.0, 1.0, 4.0))
    assert found == [2.0, 0.5, 0.25, 0.5]


def test_all_heads_ramp_in_from_the_start():
    schedule = HeadSchedule(ramp_steps=4)
    table = [weights_at(schedule, step) for step in (1, 2, 3, 4, 5, 99)]
    shares = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert table == [[1.0, share, share] for share in shares]


def test_the_table_at_the_head_of_the_module():
    schedule = HeadSchedule(decay=0.5, ramp_steps=50, add_every=100)
    steps = [1, 100, 101, 125, 150, 200, 201, 250, 300]
    table = np.array([weights_at(schedule, step) for step in steps]).T
    expected = [
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0.01, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5],
        [0, 0, 0, 0, 0, 0, 0.005, 0.25, 0.25],
    ]
    np.testing.assert_allclose(table, expected, rtol=1e-6)


def test_waiting_heads_have_a_share_and_rise_from_it():
    schedule = HeadSchedule(ramp_steps=2, add_every=10, waiting=0.2)
    found = [weights_at(schedule, step)[1] for step in (1, 10, 11, 12, 13)]
    np.testing.assert_allclose(found, [0.2, 0.2, 0.6, 1.0, 1.0], rtol=1e-6)


def run(schedule, evaluations, steps, heads):
    """Every step's weights, as the trainer asks for them."""
    place, table = schedule.start(), []
    for step in range(1, steps + 1):
        table.append(schedule.weights(place, step, (1.0,) * heads).tolist())
        place = schedule.advance(place, step, evaluations.get(step))
    return place, table


def test_adds_the_surest_head_first():
    schedule = HeadSchedule(add_every=4, order="entropy", waiting=0.25)
    evaluations = {
        2: [9.0, 9.0, 1.0, 5.0],  # an older measurement, replaced before it is used
        3: [0.1, 3.0, 4.0, 2.0],  # so head 4 comes in after step 4,
        6: [0.1, 3.0, 1.0, 0.5],  # then head 3,
        9: [0.1, 0.0, 0.0, 0.0],  # and the one that is left
    }
    place, table = run(schedule, evaluations, 14, 4)
    assert place["added"] == [[4, 4], [3, 8], [2, 12]]
    w = 0.25
    assert table[3] == [1.0, w, w, w]
    assert table[4] == table[7] == [1.0, w, w, 1.0]
    assert table[8] == table[11] == [1.0, w, 1.0, 1.0]
    assert table[12] == [1.0, 1.0, 1.0, 1.0]


def test_equal_entropies_go_by_distance():
    schedule = HeadSchedule(add_every=1, order="entropy", waiting=0.5)
    place, _ = run(schedule, {1: [2.0] * 4}, 3, 4)
    assert place["added"] == [[2, 1], [3, 2], [4, 3]]


def test_an_addition_waits_for_the_first_evaluation():
    schedule = HeadSchedule(add_every=2, order="entropy", waiting=0.5)
    place, _ = run(schedule, {5: [0.0, 2.0, 1.0]}, 7, 3)
    # Two were due by step 5.
    assert place["added"] == [[3, 5], [2, 5]]


@pytest.mark.parametrize("kill", range(1, 13))
def test_a_resumed_run_goes_on_alike(kill):
    schedule = HeadSchedule(0.7, 3, add_every=4, order="entropy", waiting=0.1)
    evaluations = {3: [0.1, 3.0, 1 / 3, 2.0], 7: [0.1, 3.0, 1.0, 0.5]}
    place, table = run(schedule, evaluations, 14, 4)
    resumed, first = run(schedule, evaluations, kill, 4)
    resumed = json.loads(json.dumps(resumed))
    rest = []
    for step in range(kill + 1, 15):
        rest.append(schedule.weights(resumed, step, (1.0,) * 4).tolist())
        resumed = schedule.advance(resumed, step, evaluations.get(step))
    assert first + rest == table
    assert resumed == place


def test_advance_leaves_the_old_place_alone():
    schedule = HeadSchedule(add_every=1, order="entropy", waiting=0.5)
    place = schedule.start()
    schedule.advance(place, 1, [1.0, 1.0])
    assert place == schedule.start()


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"decay": 0}, "HeadSchedule.decay must be a finite number above 0"),
        ({"decay": float("nan")}, "decay must be"),
        ({"ramp_steps": -1}, "ramp_steps must be an integer"),
        ({"ramp_steps": True}, "ramp_steps must be"),
        ({"add_every": 0}, "add_every must be a positive integer"),
        ({"order": "size"}, "order must be one of distance, entropy, not 'size'"),
        ({"waiting": 1.0}, "waiting must be a finite number"),
        ({"order": "entropy", "waiting": 0.1}, "set HeadSchedule.add_every too"),
        ({"waiting": 0.1}, "set HeadSchedule.add_every too"),
        ({"order": "entropy", "add_every": 5}, "needs HeadSchedule.waiting above 0"),
    ],
)
def test_bad_settings_end_with_one_sentence(fields, words):
    with pytest.raises(UserError, match=words) as error:
        HeadSchedule(**fields)
    assert "\n" not in str(error.value)
