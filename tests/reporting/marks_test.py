"""Labels of points do not overlap and lie inside the drawing."""

import itertools

from bpd_jax.reporting import marks
from bpd_jax.reporting.marks import Box


def test_labels_of_close_points_do_not_overlap():
    frame = Box(0, 0, 300, 200)
    points = [(100, 100, "MultiNews"), (104, 103, "XSum"), (112, 96, "NewsRoom")]
    placed = marks.place_labels(points, frame)
    assert [label.text for label in placed] == [name for _, _, name in points]
    for first, second in itertools.combinations(placed, 2):
        assert first.box.intersection(second.box) == 0


def test_unreadable_labels_are_left_out():
    points = [(100 + i % 5, 100 + i // 5, f"Name {i}") for i in range(40)]
    placed = marks.place_labels(points, Box(0, 0, 300, 200))
    assert 2 <= len(placed) < 20
    for first, second in itertools.combinations(placed, 2):
        assert first.box.intersection(second.box) <= 0.2 * first.box.area
