import dataclasses
import json
import math

import pytest

from bpd_jax.training.validation import Selection


def after(selection, *values):
    for step, value in enumerate(values, start=1):
        selection = selection.after(10 * step, {selection.name: value, "other": 0.0})
    return selection


@pytest.mark.parametrize(
    "name, values, best",
    [
        ("validation_loss", [3.0, 2.0, 2.5], (20, 2.0, 1)),
        ("validation_accuracy_head_2", [0.3, 0.2, 0.5], (30, 0.5, 0)),
        # An evaluation of nan is replaced by any other, but never replaces one.
        ("validation_loss", [math.nan, 2.0], (20, 2.0, 0)),
        ("validation_loss", [2.0, math.nan, math.inf, 2.0], (10, 2.0, 3)),
    ],
)
def test_the_lowest_loss_and_the_highest_accuracy_are_best(name, values, best):
    selection = after(Selection(name), *values)
    assert (selection.step, selection.value, selection.waited) == best
    assert [selection.is_over(patience) for patience in (3, 4, None)] == [
        *(best[2] >= 3, False, False)
    ]


def test_json_round_trip_depends_on_the_column():
    selection = after(Selection("validation_loss"), 3.0, 4.0)
    saved, steps = dataclasses.asdict(selection), [10, 20]
    assert Selection("validation_loss").restored(saved, steps) == selection
    # The best of another column stays until this one has a best.
    restored = Selection("validation_loss_head_1").restored(saved, steps)
    assert restored == Selection("validation_loss_head_1", step=10)
    assert str(restored) == "no validation_loss_head_1 yet"
    assert after(restored, 9.0).value == 9.0
    new = Selection("validation_loss")
    assert new.restored(None, steps) == new


def test_losses_of_other_weights_are_not_comparable():
    selection = after(Selection("validation_loss", weights=(1.0, 0.5)), 3.0, 4.0)
    saved = json.loads(json.dumps(dataclasses.asdict(selection)))
    same = Selection("validation_loss", weights=(1.0, 0.5))
    assert same.restored(saved, [10]) == selection
    other = Selection("validation_loss", weights=(1.0, 0.0))
    assert other.restored(saved, [10]) == dataclasses.replace(other, step=10)
    # A single head's loss has no weight.
    head = after(Selection("validation_loss_head_1", weights=(1.0, 0.5)), 3.0)
    other_head = Selection("validation_loss_head_1", weights=(1.0, 0.0))
    restored_head = other_head.restored(dataclasses.asdict(head), [10])
    assert (restored_head.step, restored_head.value) == (10, 3.0)


def test_deleted_best_step_is_forgotten():
    selection = after(Selection("validation_loss", weights=(1.0,)), 3.0, 4.0)
    new, saved = Selection("validation_loss", weights=(1.0,)), vars(selection)
    assert new.restored(saved, [10, 20]) == selection
    assert new.restored(saved, [20]) == new
